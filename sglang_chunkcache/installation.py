"""What an adapter's extra does not install: commands show their help without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_chunkcache.errors import ServerError


@contextmanager
def server_installation() -> Iterator[None]:
    """Around imports. Raises ServerError, whose message is one line: a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ServerError(f"needs the server's installation: {error}") from None
