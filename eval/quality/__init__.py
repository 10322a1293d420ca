"""What reuse does to answers: `python -m eval quality`."""
