"""Everything this package raises on purpose.

A chain that a tree does not know is no error: mirrors lag, so such notices are ignored and counted.
"""


class CallerError(ValueError):
    """What the caller passed cannot be served, HTTP 400 at the edge. The message names the
    argument, the limit and the value."""


class ChunkError(CallerError):
    """A chunk without tokens, no 32-bit token id, a duplicate in a request."""


class SpanError(CallerError):
    """Spans that overlap, run backwards or leave their prompt."""


class LimitError(CallerError):
    """A number outside its range: window, threshold, capacity, rank, budget."""


class MessageError(CallerError):
    """A conversation message that is no JSON object."""


class IntegrityError(RuntimeError):
    """Our own bug: a data structure contradicts itself. Says how, with its numbers."""


def check_at_least(name: str, value: float, minimum: float) -> None:
    """Raise LimitError unless value >= minimum (NaN fails too)."""
    if not value >= minimum:
        raise LimitError(f"{name} must be at least {minimum} but got {value}")
