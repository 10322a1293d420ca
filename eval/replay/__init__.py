"""Simulates a cache of limited size on a trace: `python -m eval replay`. Standard library only."""
