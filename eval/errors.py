"""The error for mistakes of a user of `python -m eval`."""


class CommandError(ValueError):
    """A missing file, a bad line, an impossible option:
    shown as one line, exit code 2, no traceback."""
