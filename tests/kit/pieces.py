"""The token ids around the chunks of a prompt that has them in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sglang_chunkcache.front.prompt import PromptAssembler, TemplateSettings, turn_start


class Pieces(NamedTuple):
    """`lead` joins them to what comes before: nothing, or an answer."""

    lead: tuple[int, ...]
    intro: tuple[int, ...]
    outro: tuple[int, ...]


def pieces_of(
    assembler: PromptAssembler,
    messages: Sequence[Mapping[str, Any]],
    *,
    num_agreed: int = 0,
    has_chunks: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Pieces:
    """Those of the one exchange that `exchanges` makes without `is_split`."""
    (exchange,) = assembler.exchanges(
        messages,
        num_agreed=num_agreed,
        with_chunks={turn_start(messages)} if has_chunks else (),
        settings=TemplateSettings(tools),
    )
    (area,) = exchange.areas
    texts = (exchange.lead, area.intro, area.ending)
    return Pieces(*map(assembler.tokenizer.encode, texts))
