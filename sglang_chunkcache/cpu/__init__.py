"""The engine on a machine without a GPU:
platform, attention, and the operators that torchvision lacks there."""
