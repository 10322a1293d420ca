"""Load on servers that share a machine fairly: `python -m eval serve` and `sensitivity`."""
