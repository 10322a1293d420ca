"""Attention of scattered tokens, timed: see command.py."""
