"""What the adapters share, without their frameworks and without a server."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx")

from sglang_chunkcache.errors import ServerError
from sglang_chunkcache.front.bodies import MAX_ID_CHARS
from sglang_chunkcache.integrations.server import MAX_ID, Endpoint, _Events, chunks_of


def test_longest_id_is_the_servers() -> None:
    assert MAX_ID == MAX_ID_CHARS


@pytest.mark.parametrize("path", ["", "/", "/v1", "/rag/v1", "/rag/v1/"])
def test_url_may_be_that_of_openais_client(path: str) -> None:
    """A proxy's own path stays."""
    for base in ("http://a:1", "http://a:1/llm"):
        assert Endpoint(base + path)._options()["base_url"] == base


def test_events_end_with_line_feeds_alone() -> None:
    """JSON may have what Python takes for the end of a line, and pieces end anywhere."""
    odd = "x\u2028y\x85z"
    text = f'data: {{"a": "{odd}"}}\r\n\r\ndata: {{"b": 1}}\n\ndata: [DONE]\n\n'
    events = _Events()
    found = [each for at in range(0, len(text), 7) for each in events.of(text[at : at + 7])]
    events.end()
    assert found == [{"a": odd}, {"b": 1}]
    with pytest.raises(ServerError, match="ended early"):
        _Events().end()
    for error in ('"no"', '{"message": "no"}'):
        with pytest.raises(ServerError, match=r"^no$"):
            list(_Events().of(f'data: {{"error": {error}}}\n'))


def test_ids_that_cannot_name_a_document_are_positions() -> None:
    for ids in (["a", None], ["1", 1], ["a", "x" * 257]):
        assert [each["id"] for each in chunks_of(["s", "t"], ids)] == ["0", "1"]
    assert [each["id"] for each in chunks_of(["s", "t"], ["a", 2])] == ["a", "2"]
