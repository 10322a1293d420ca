"""The errors that clients and commands see, in one tree.

ChunkCacheError
  RequestError        a client's mistake: HTTP 400; the message begins with the field and a colon
    EngineRefusedError  SGLang's own refusal of a request that had begun
    TooLongError      a text that cannot fit the context
    HistoryError      it requires a history that is not known: HTTP 422, which clients do not retry
    BodyTooLargeError a body over the limit: HTTP 413
  BusyError           too many long requests wait, or the server is about to end: HTTP 503
  SearchFailedError   the index gave no answer: HTTP 500 or 503
  ServerError         a mistake on a command line, or a server that does not serve: one line
    RefusedError      the server answered 400: this request is refused, others may be served
"""

from __future__ import annotations


class ChunkCacheError(Exception):
    """Base of all. `status`: of the HTTP answer."""

    status = 500


class RequestError(ChunkCacheError, ValueError):
    """A request that cannot be served as it is. The message names the field."""

    status = 400


class EngineRefusedError(RequestError):
    """SGLang refuses a parameter. The bookkeeper has counted the request already."""


class TooLongError(RequestError):
    """A text that cannot fit the context; it is not tokenised."""


class HistoryError(RequestError):
    """Nobody can tell which chunks an earlier turn has shown,
    and the request would rather have no answer."""

    status = 422


class BodyTooLargeError(RequestError):
    """A body over the limit, of which the rest is not read."""

    status = 413


class BusyError(ChunkCacheError):
    """The server takes no more requests now:
    too many long ones wait already, or it is about to end."""

    status = 503


class SearchFailedError(ChunkCacheError):
    """A search that failed without a mistake of the client's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerError(ChunkCacheError, ValueError):
    """A user's mistake, or a server that does not serve. Commands show it as one line."""


class RefusedError(ServerError):
    """The server answered 400: this request is refused, others may be served."""
