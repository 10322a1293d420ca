"""The errors that users see.

ValueError
└── RetrievalError       a mistake in flags, files or queries: one line that names it
    ├── CorruptIndexError  an index directory that is damaged, incomplete or made by something else,
    │                      or a collection that is
    └── UnavailableError   a vector database that does not answer now
"""


class RetrievalError(ValueError):
    """A mistake of the user; the message is one line."""


class CorruptIndexError(RetrievalError):
    """The index directory differs from its manifest."""


class UnavailableError(RetrievalError):
    """Try again later."""


def first_line(error: BaseException) -> str:
    """Of a library's message, for one of ours."""
    return str(error).strip().partition("\n")[0]
