"""The effect of reuse on answers: `python -m eval quality`."""
