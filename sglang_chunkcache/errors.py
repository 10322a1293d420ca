"""The errors that clients and commands see, in one tree.

ChunkCacheError
  RequestError          a client's mistake: HTTP 400; the message begins with the field and a colon
    EngineRefusedError  SGLang refuses a parameter of a request that had begun, and is counted
    TooLongError        a text that cannot fit the context; it is not tokenised
    HistoryError        nobody can tell which chunks an earlier turn has shown, and the request
                        would rather have no answer: HTTP 422, which clients do not retry
    BodyTooLargeError   a body over the limit, of which the rest is not read: HTTP 413
  ForbiddenError        the live page's data is for others than who asks: HTTP 403
  BusyError             too many long requests wait, or the server is about to end: HTTP 503
  SearchFailedError     the index gave no answer, without a client's mistake: HTTP 500 or 503
  ServerError           a mistake on a command line, or a server that does not serve: one line
    RefusedError        the server answered 400: this request is refused, others may be served
"""

from __future__ import annotations


class ChunkCacheError(Exception):
    """Base of all. `status`: of the HTTP answer."""

    status = 500


class RequestError(ChunkCacheError, ValueError):
    status = 400


class EngineRefusedError(RequestError):
    pass


class TooLongError(RequestError):
    pass


class HistoryError(RequestError):
    status = 422


class BodyTooLargeError(RequestError):
    status = 413


class ForbiddenError(ChunkCacheError):
    status = 403


class BusyError(ChunkCacheError):
    status = 503


class SearchFailedError(ChunkCacheError):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerError(ChunkCacheError, ValueError):
    pass


class RefusedError(ServerError):
    pass
