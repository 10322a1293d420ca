"""The engine without a GPU: platform, attention, and what torchvision lacks there."""
