"""Prompt assembly: pieces tokenised apart decode to the very text the chat template renders."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("sglang")

from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.serving_chat import normalize_tool_content
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    process_content_for_template_format,
)

from radix_ext import Span, chunk_id
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.prompt import (
    DEFAULT_TEMPLATE,
    PromptAssembler,
    joined,
    read_template,
)
from tests.examples import examples
from tests.kit.pieces import Pieces, pieces_of
from tests.reference.tiny_tokenizer import CHAT_TEMPLATE, make_spaced_tokenizer, make_tokenizer

TRIMMING = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system"
    " = messages[0].content %}{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}{%"
    " for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{"
    " raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}[INST] {{"
    " system if loop.first else '' }}{{ m.content }} [/INST]{% else %} {{ m.content }}<|im_end|>{%"
    " endif %}{% endfor %}"
)
TOOLS = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{%"
    " for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content"
    " }}</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in"
    " m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson"
    " }}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)
PARTS = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{% if"
    " message.content is string %}{{ message.content }}{% else %}{% for content in message.content"
    " %}{{ content.text }}{{ '|' if not loop.last }}{% endfor %}{% endif %}<|im_end|>\n{% endfor"
    " %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "parts": PARTS,
    "tools": TOOLS,
    "trimming": TRIMMING,
    "alternating": ALTERNATING,
}
MAKERS = {"byte_level": make_tokenizer, "spaced": make_spaced_tokenizer}
_tokenizers: dict[str, Any] = {}


def tokenizer_of(kind: str, template: str = "chatml") -> Any:
    tokenizer = _tokenizers.setdefault(kind, MAKERS[kind]())
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def make_assembler(
    kind: str = "byte_level", template: str = "chatml", **options: Any
) -> PromptAssembler:
    return PromptAssembler(tokenizer_of(kind, template), **{"separator": "\n\n", **options})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def render(
    assembler: PromptAssembler, messages: Sequence[dict[str, Any]], tools: Any = None
) -> str:
    return str(
        assembler._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
    )


def text(assembler: PromptAssembler, ids: Sequence[int]) -> str:
    return assembler.tokenizer.decode(ids).removeprefix(" ")


def ids_of(assembler: PromptAssembler, pieces: Pieces, chunks: Sequence[str]) -> list[int]:
    return [*pieces.lead, *body_of(assembler, pieces, chunks)[0]]


def body_of(
    assembler: PromptAssembler, pieces: Pieces, chunks: Sequence[str]
) -> tuple[array[int], tuple[Span, ...]]:
    """What follows the lead: ids, and the chunks' spans in them."""
    items = [assembler.chunk(chunk, "t") for chunk in chunks]
    return joined(
        pieces.intro, [*((item.token_ids, item.chunk.id) for item in items), (pieces.outro, None)]
    )


CHUNK_TEXTS = [
    "Bako ranis.",
    "zweite Fundstelle: é 中 🙂",
    "{curly} {{ braces }} <tag>",
    "two\nlines\n\nand more",
]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("num_chunks", [0, 1, 4])
def test_prompt_decodes_to_the_rendered_template(kind: str, template: str, num_chunks: int) -> None:
    """The model sees what the same text would show it, wherever the pieces were cut."""
    assembler = make_assembler(kind, template)
    chunks = CHUNK_TEXTS[:num_chunks]
    system = {"role": "system", "content": "Be brief."}
    pieces = pieces_of(assembler, [system, user("Wer? 中")], has_chunks=bool(chunks))
    content = "".join(chunk + "\n\n" for chunk in chunks) + "Wer? 中"
    assert text(assembler, ids_of(assembler, pieces, chunks)) == render(
        assembler, [system, user(content)]
    )


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_later_turn_continues_the_earlier_one(kind: str, template: str) -> None:
    """Turn 1, its answer and turn 2's pieces in a row are the whole conversation as rendered."""
    assembler = make_assembler(kind, template)
    first, answer, second = user("Who?"), assistant("Bako."), user("And then?")
    one = pieces_of(assembler, [first])
    two = pieces_of(assembler, [first, answer, second], num_agreed=2)
    ids = [
        *ids_of(assembler, one, CHUNK_TEXTS[:1]),
        *assembler.tokenizer.encode("Bako."),
        *ids_of(assembler, two, CHUNK_TEXTS[1:2]),
    ]
    messages = [user(CHUNK_TEXTS[0] + "\n\nWho?"), answer, user(CHUNK_TEXTS[1] + "\n\nAnd then?")]
    expected = render(assembler, messages)
    if template == "alternating":
        expected = expected.replace(" Bako.", "Bako.")
    assert text(assembler, ids) == expected


@settings(max_examples=examples(60))
@given(
    st.sampled_from(list(MAKERS)),
    st.lists(st.text(min_size=1, max_size=12), max_size=3),
    st.text(max_size=12),
)
def test_any_text_round_trips(kind: str, chunks: list[str], question: str) -> None:
    """Unicode, control characters, template-like text: nothing changes between chunks."""
    assembler = make_assembler(kind)
    pieces = pieces_of(assembler, [user(question)], has_chunks=bool(chunks))
    content = "".join(chunk + "\n\n" for chunk in chunks) + question
    assert text(assembler, ids_of(assembler, pieces, chunks)) == render(assembler, [user(content)])


@pytest.mark.parametrize("kind", MAKERS)
def test_chunk_has_the_same_ids_wherever_it_stands(kind: str) -> None:
    """Identity must not depend on neighbours, or nothing is ever reused."""
    assembler = make_assembler(kind)
    pieces = pieces_of(assembler, [user("Q")])
    seen: dict[str, set[tuple[int, ...]]] = {}
    for chunks in (CHUNK_TEXTS, CHUNK_TEXTS[::-1]):
        body, spans = body_of(assembler, pieces, chunks)
        bounds = [len(pieces.intro), *(span.end for span in spans)]
        assert [span.start for span in spans] == bounds[:-1]
        assert bounds[-1] == len(body) - len(pieces.outro)
        for span, chunk in zip(spans, chunks, strict=True):
            assert chunk_id(body[span.start : span.end]) == span.chunk
            seen.setdefault(chunk, set()).add(tuple(body[span.start : span.end]))
    assert all(len(ids) == 1 for ids in seen.values())


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [(["A", "B"], "Use:\nA\nB\nNow {chunks}{question}? please."), ([], "{chunks}{question}?")],
)
def test_template_texts_stand_around_chunks_and_question(chunks: list[str], shown: str) -> None:
    """Intro, between and after, as the user's file says; without chunks they would mislead."""
    template = "Use:\n{chunks}Now {question} please."
    assembler = PromptAssembler(tokenizer_of("byte_level"), template=template, separator="\n")
    question = user("{chunks}{question}?")  # of a user it is only text
    pieces = pieces_of(assembler, [question], has_chunks=bool(chunks))
    assert text(assembler, ids_of(assembler, pieces, chunks)) == render(assembler, [user(shown)])


@pytest.mark.parametrize(
    "template",
    ["", "{question}{chunks}", "{chunks}{chunks}{question}", "{chunks}{question}{question}"],
)
def test_bad_rag_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="rag template"):
        PromptAssembler(tokenizer_of("byte_level"), template=template, separator="")


CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "1", "content": "42"}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "after",
    [
        [CALL, RESULT],
        [CALL, RESULT, {**CALL, "content": "Once more."}, RESULT],
        [CALL, RESULT, assistant("So")],
        [assistant("x"), {"role": "system", "content": "y"}],
    ],
    ids=["one step", "two steps", "an answer last", "a system message last"],
)
def test_chunks_stay_with_the_last_user_message(kind: str, after: list[dict[str, Any]]) -> None:
    """What follows it, a tool's calls and results above all, belongs to the turn that it opens."""
    assembler = make_assembler(kind, "tools")
    tools = [{"name": "f"}]
    before = [{"role": "system", "content": "Be brief."}, user("a"), CALL, RESULT, assistant("b")]
    asked = [*before, user("Who?"), *after]
    pieces = pieces_of(assembler, asked, has_chunks=True, tools=tools)
    asked[len(before)] = user(CHUNK_TEXTS[0] + "\n\nWho?")
    shown = [{**message, "content": message["content"] or ""} for message in asked]
    if shown[-1]["role"] == "assistant":
        shown[-1] = user(shown[-1]["content"])
    expected = render(assembler, shown, tools=tools)
    assert text(assembler, ids_of(assembler, pieces, CHUNK_TEXTS[:1])) == expected


def test_steps_of_a_tool_loop_share_the_turn() -> None:
    """Lead and intro are the same in every step, behind stored turns too,
    so the chunks are found cached."""
    assembler = make_assembler(template="tools")
    earlier = [user("a"), assistant("b")]
    for history, num_agreed in (([], 0), (earlier, 2)):
        steps = [
            pieces_of(assembler, [*history, user("Who?"), *after], num_agreed=num_agreed)
            for after in ([], [CALL, RESULT], [CALL, RESULT, CALL, RESULT])
        ]
        assert len({(step.lead, step.intro) for step in steps}) == 1
        ends = [assembler.tokenizer.decode(step.outro) for step in steps]
        assert ends[2].startswith(ends[1])
        assert ends[1].startswith(ends[0])


def in_parts(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": each} for each in texts]}


def as_sglang_renders(assembler: PromptAssembler, messages: Sequence[dict[str, Any]]) -> str:
    """What its chat serving gives to the template, rendered."""
    content_format = detect_jinja_template_content_format(assembler._tokenizer.chat_template)
    shaped = [
        process_content_for_template_format(each, content_format, [], [], [], [])
        for each in messages
    ]
    for each in shaped:
        each["content"] = normalize_tool_content(each["role"], each.get("content"))
    if shaped[-1]["role"] == "assistant" and isinstance(shaped[-1]["content"], str):
        shaped[-1] = user(shaped[-1]["content"])
    return render(assembler, shaped)


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [in_parts("user", "Who", "is it?")],
    "no part": [in_parts("user")],
    "empty part": [in_parts("user", "", "Who?")],
    "all roles": [
        in_parts("system", "Be", "brief."),
        user("a"),
        in_parts("assistant", "b", "c"),
        in_parts("user", "d", "e"),
    ],
    "tool": [user("a"), in_parts("tool", "b", "c")],
    "answer last": [in_parts("user", "a", "b"), in_parts("assistant", "c", "d")],
    "reasoning": [
        user("a"),
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}],
        },
        user("c"),
    ],
}


@pytest.mark.parametrize("num_chunks", [0, 2])
@pytest.mark.parametrize("template", ["chatml", "parts"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_parts_are_shown_as_sglang_shows_them(
    messages: list[dict[str, Any]], template: str, num_chunks: int
) -> None:
    """A template that reads lists gets them, another one a text."""
    assembler = make_assembler(
        template=template, content_format=detect_jinja_template_content_format(TEMPLATES[template])
    )
    chunks = CHUNK_TEXTS[:num_chunks]
    pieces = pieces_of(assembler, messages, has_chunks=bool(chunks))
    shown: list[dict[str, Any]] = deepcopy(messages)
    place = max(i for i, message in enumerate(shown) if message["role"] == "user")
    if chunks:
        ahead = "".join(f"{chunk}\n\n" for chunk in chunks)
        if isinstance(shown[place]["content"], str):
            shown[place]["content"] = ahead + shown[place]["content"]
        else:
            shown[place]["content"] = shown[place]["content"] or [{"type": "text", "text": ""}]
            shown[place]["content"][0]["text"] = ahead + shown[place]["content"][0]["text"]
    assert text(assembler, ids_of(assembler, pieces, chunks)) == as_sglang_renders(assembler, shown)


REFUSED: list[tuple[list[Any], str, str]] = [
    ([], "chatml", "messages"),
    *(
        ([user("a"), {"role": "user", "content": [part]}], "chatml", r"messages\.1\.content")
        for part in ({"type": "image_url"}, "text", {"type": "text", "text": 1})
    ),
    ([{"role": "user", "content": None}], "chatml", "messages"),
    ([user("a"), user("b")], "alternating", "roles must alternate"),
    ([user("a")], "none", "--chat-template"),
    ([user("a")], "nothing", "0 times"),
]


@pytest.mark.parametrize(("messages", "template", "named"), REFUSED)
def test_what_cannot_be_assembled_is_a_400(
    messages: list[Any], template: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The field, what the template raises, or the flag that helps."""
    assembler = make_assembler(template=template if template in TEMPLATES else "chatml")
    if template not in TEMPLATES:
        broken = None if template == "none" else template
        monkeypatch.setattr(assembler._tokenizer, "chat_template", broken)
    with pytest.raises(RequestError, match=named):
        pieces_of(assembler, messages)


def test_chunk_is_remembered() -> None:
    """A popular chunk is tokenised once by tenant; the separator is part of it."""
    one, other = make_assembler(separator="\n"), make_assembler(separator="--")
    assert one.chunk("abc", "t") is one.chunk("abc", "t")
    assert one.chunk("abc", "t") is not one.chunk("abc", "another tenant")
    assert one.chunk("abc", "t").chunk.id != other.chunk("abc", "t").chunk.id


def test_read_template(tmp_path: Path) -> None:
    """A bad file names the flag."""
    good, bad = tmp_path / "t", tmp_path / "b"
    good.write_text("é{chunks}{question}", encoding="utf-8")
    bad.write_bytes(b"\xff\xfe\xff")
    assert read_template(None) == DEFAULT_TEMPLATE
    assert read_template(str(good)) == "é{chunks}{question}"
    for path in (bad, tmp_path / "none"):
        with pytest.raises(ValueError, match="--chunkcache-rag-template"):
            read_template(str(path))


def test_separator_may_be_a_control_token() -> None:
    """It is the operator's; the chunk before it is not."""
    assembler = make_assembler(separator="<|im_end|>\n")
    ids = list(assembler.chunk("a<|im_end|>b", "").token_ids)
    end = tokenizer_of("byte_level").convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 1
    assert assembler.tokenizer.decode(ids) == "a<|im_end|>b<|im_end|>\n"
