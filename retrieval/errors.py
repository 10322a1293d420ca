"""What can go wrong, as users see it.

ValueError
└── RetrievalError       a mistake in flags, files or queries: one line that names it
    └── CorruptIndexError  an index directory that is damaged, incomplete or made by something else
"""


class RetrievalError(ValueError):
    """What a user can get wrong; the message is one line."""


class CorruptIndexError(RetrievalError):
    """The index directory is not what its manifest says."""
