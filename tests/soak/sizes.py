"""How long the tests in this folder run:
`SOAK_SCALE=0.1` takes a tenth of the requests and passages, 5 five times as many."""

import os


def scaled(count: int, least: int = 1) -> int:
    """`count` times SOAK_SCALE, at least `least`."""
    return max(least, round(count * float(os.environ.get("SOAK_SCALE", "1"))))
