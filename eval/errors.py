"""What a user of `python -m eval` can get wrong."""


class CommandError(ValueError):
    """A missing file, a bad line, an impossible option: shown as one line, exit code 2, no traceback."""
