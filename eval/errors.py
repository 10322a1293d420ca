"""Errors for mistakes of a user of `python -m eval`."""

from __future__ import annotations

from collections.abc import Sequence

from radix_ext import CallerError


class CommandError(ValueError):
    """A missing file, a bad line, an impossible option:
    shown as one line, exit code 2, no traceback."""


class PolicyError(CallerError):
    """A replay's policy that does not exist."""


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise PolicyError unless value is one of the choices."""
    if value not in choices:
        raise PolicyError(f"{name} must be one of {', '.join(choices)} but got {value!r}")
