"""Selectors of a user's own module: the README's example on a real front,
and modules that the start refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from radix_ext import FusionRequest, Need  # noqa: E402
from radix_ext.cfo import Scored  # noqa: E402
from radix_ext.fusion_request import asked_layers  # noqa: E402
from sglang_chunkcache.config import SELECTORS, ChunkCacheConfig  # noqa: E402
from sglang_chunkcache.errors import RequestError  # noqa: E402
from sglang_chunkcache.front.bodies import RagFields  # noqa: E402
from sglang_chunkcache.front.fusion_options import ReuseIn, fused_request  # noqa: E402
from sglang_chunkcache.front.parse import parse  # noqa: E402
from sglang_chunkcache.fusion import selectors  # noqa: E402
from sglang_chunkcache.fusion.selectors.base import Evidence  # noqa: E402
from sglang_chunkcache.own_selectors import check_selectors, own_selectors  # noqa: E402
from sglang_chunkcache.wire.events import NOTHING_READ  # noqa: E402
from sglang_chunkcache.wire.message import decode, encode  # noqa: E402
from sglang_chunkcache.wire.spans import RequestSpans  # noqa: E402
from tests.reference.moved_chunks import as_lists, make_chunk  # noqa: E402

README = Path(selectors.__file__).parent / "README.md"
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module, and name it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(text: str) -> str:
        names.append(f"selectors_of_test_{tmp_path.name}_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        return names[-1]

    yield write
    own_selectors.cache_clear()
    for name in names:
        sys.modules.pop(name, None)


def example() -> str:
    (text,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return str(text)


def test_readmes_example_is_a_selector(write: Write) -> None:
    """Of a server, and of a request that names it; scheduler and front find the same."""
    server = ChunkCacheConfig(reuse="fused", selector="last", selectors=write(example()))
    check_selectors(server)
    assert fused_request(server, ReuseIn(mode="fused")) == FusionRequest("last", 0.15)
    fields = {"mode": "fused", "selector": "last", "ratio": 0.5}
    asked = parse(RagFields, {"reuse": fields}).fusion_request(server)
    assert asked == FusionRequest("last", 0.5)
    chunks = [make_chunk("a", 0, 4), make_chunk("b", 4, 5)]
    selection = selectors.get("last", server.selectors).select(chunks, asked, Evidence())
    assert as_lists(selection) == [[2, 3], [2, 3, 4]]


def test_needs_follow_the_request() -> None:
    """What a selector reads is part of the recipe; it crosses the process border."""
    server = ChunkCacheConfig(reuse="fused", selectors="eval.selectors")
    names = ("prophet", "h2o", "random")
    prophet, h2o, drawn = (
        fused_request(server, ReuseIn(mode="fused", selector=name)) for name in names
    )
    assert prophet.own_needs == {Need.QUESTION, Need.ALL_LAYERS}
    assert (prophet.asks_the_question, prophet.compares_kv) == (True, False)
    assert asked_layers(prophet, 14) == 14
    assert prophet.cheaper is not None
    assert (prophet.cheaper.selector, prophet.cheaper.needs) == ("first", frozenset())
    assert (h2o.scored, h2o.asks_the_question) == (Scored.ALL, False)
    assert (drawn.scored, drawn.needs) == (Scored.NOTHING, frozenset())
    spans = RequestSpans((), "n", 0, NOTHING_READ, fusion=prophet)
    assert decode(encode(spans), RequestSpans).fusion == prophet
    with pytest.raises(RequestError, match="prophet has no choice of them"):
        fused_request(server, ReuseIn(mode="fused", selector="prophet", layers=3))


def test_unknown_selector_is_named_with_those_that_there_are() -> None:
    """Theirs are among them; also where the request moves nothing."""
    server = ChunkCacheConfig(reuse="fused", selectors="eval.selectors")
    for mode in ("fused", "exact"):
        with pytest.raises(RequestError, match="context, random, h2o, prophet, set, got 'best'"):
            parse(RagFields, {"reuse": {"mode": mode, "selector": "best"}}).fusion_request(server)


def own(body: str, made: str = "A()") -> str:
    """A module whose class is like `FirstTokens`, but for this."""
    base = "from sglang_chunkcache.fusion.selectors.first import FirstTokens"
    return f"{base}\nclass A(FirstTokens): {body}\nSELECTORS = ({made},)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs SELECTORS, a tuple of its selectors"),
        ("SELECTORS = ()", "needs SELECTORS"),
        ("SELECTORS = {'a': 1}", "needs SELECTORS"),
        ("SELECTORS = (1,)", "1 is no selector"),
        (own("pass"), "the name first is taken"),
        (own("name = 'a'", "A(), A()"), "the name a is taken"),
        (own("name = 'a/b'"), "'a/b' is no name of a selector"),
        (own("name = 'a'; needs = frozenset({'b'})"), "the needs of a"),
        ("import nothing_of_that_name", "cannot be imported: ModuleNotFoundError: No module"),
        ("def", "cannot be imported: SyntaxError"),
    ],
)
def test_module_that_does_not_suit_is_refused(write: Write, text: str, message: str) -> None:
    """With one line that names the flag and the module."""
    module = write(text)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        check_selectors(ChunkCacheConfig(reuse="fused", selectors=module))
    assert str(refused.value).startswith(f"--chunkcache-selectors {module}: ")
    assert "\n" not in str(refused.value)


def test_servers_own_selector_must_be_known() -> None:
    """One of the module's, or of ours."""
    for name in (*SELECTORS, "h2o"):
        check_selectors(ChunkCacheConfig(selector=name, selectors="eval.selectors"))
    with pytest.raises(ValueError, match="--chunkcache-selector best: must be one of none, first"):
        check_selectors(ChunkCacheConfig(selector="best", selectors="eval.selectors"))
    with pytest.raises(ValueError, match="--chunkcache-selector must be one of none, first"):
        ChunkCacheConfig(selector="best")
