"""Measures servers under load, interleaved on one machine: `python -m eval serve`."""
