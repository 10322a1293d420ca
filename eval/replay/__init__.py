"""What a cache of limited size would find on a trace: `python -m eval replay`. Standard library only."""
