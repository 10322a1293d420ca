"""Everything this package raises on purpose.

```
ValueError
└── CallerError              the caller passed something wrong; HTTP 400 at the edge
    ├── ChunkError           a chunk without tokens, no 32-bit token id, a duplicate in a request
    ├── SpanError            spans that overlap, run backwards or leave the prompt
    ├── LimitError           a number outside its range (window, threshold, capacity, rank, budget)
    ├── PolicyError          a policy name that does not exist
    └── MessageError         a message that is no JSON object
RuntimeError
└── IntegrityError           our own bug: every violated invariant, with its numbers, in one message
```
A chain that a tree does not know is no error: mirrors lag, so such notices are ignored and counted.
"""

from collections.abc import Iterable, Sequence


class CallerError(ValueError):
    """What the caller passed cannot be served;
    the message names the argument, the limit and the value."""


class ChunkError(CallerError):
    """A chunk that cannot be one."""


class SpanError(CallerError):
    """Spans that overlap, run backwards or leave their prompt."""


class LimitError(CallerError):
    """A number outside its range."""


class PolicyError(CallerError):
    """An unknown policy name."""


class MessageError(CallerError):
    """A conversation message that cannot be hashed."""


class IntegrityError(RuntimeError):
    """A data structure contradicts itself. `violations` holds one line per contradiction."""

    def __init__(self, violations: Iterable[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(self.violations))


def check_at_least(name: str, value: float, minimum: float) -> None:
    """Raise LimitError unless value >= minimum (NaN fails too)."""
    if not value >= minimum:
        raise LimitError(f"{name} must be at least {minimum} but got {value}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise PolicyError unless value is one of the choices."""
    if value not in choices:
        raise PolicyError(f"{name} must be one of {', '.join(choices)} but got {value!r}")
