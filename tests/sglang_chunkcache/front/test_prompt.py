"""Prompt assembly: pieces tokenised apart decode to the very text the chat template renders."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
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
    TurnPieces,
    joined,
    read_template,
    text_of,
)
from tests.examples import examples
from tests.reference.tiny_tokenizer import CHAT_TEMPLATE, make_spaced_tokenizer, make_tokenizer

TRIMMING = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] +"
    " '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
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
    "headers": HEADERS,
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


def render(assembler: PromptAssembler, messages: Sequence[dict[str, Any]]) -> str:
    return str(
        assembler._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    )


def text(assembler: PromptAssembler, ids: Sequence[int]) -> str:
    return assembler.tokenizer.decode(ids).removeprefix(" ")


def ids_of(assembler: PromptAssembler, pieces: TurnPieces, chunks: Sequence[str]) -> list[int]:
    return [*pieces.lead, *body_of(assembler, pieces, chunks)[0]]


def body_of(
    assembler: PromptAssembler, pieces: TurnPieces, chunks: Sequence[str]
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
    pieces = assembler.turn([system, user("Wer? 中")], num_agreed=0, has_chunks=bool(chunks))
    content = "".join(chunk + "\n\n" for chunk in chunks) + "Wer? 中"
    assert text(assembler, ids_of(assembler, pieces, chunks)) == render(
        assembler, [system, user(content)]
    )


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_later_turn_continues_the_earlier_one(kind: str, template: str) -> None:
    """Turn 1, its answer and turn 2's pieces in a row are the whole conversation as rendered."""
    assembler = make_assembler(kind, template)
    first, second, answer = (
        user("Who?"),
        user("And then?"),
        {"role": "assistant", "content": "Bako."},
    )
    one = assembler.turn([first], num_agreed=0, has_chunks=True)
    two = assembler.turn([first, answer, second], num_agreed=2, has_chunks=True)
    ids = [
        *ids_of(assembler, one, CHUNK_TEXTS[:1]),
        *assembler.tokenizer.encode("Bako."),
        *ids_of(assembler, two, CHUNK_TEXTS[1:2]),
    ]
    messages = [user(CHUNK_TEXTS[0] + "\n\nWho?"), answer, user(CHUNK_TEXTS[1] + "\n\nAnd then?")]
    got, expected = text(assembler, ids), render(assembler, messages)
    assert (
        got == expected.replace(" Bako.", "Bako.") if template == "alternating" else got == expected
    )


@settings(max_examples=examples(60))
@given(
    st.sampled_from(list(MAKERS)),
    st.lists(st.text(min_size=1, max_size=12), max_size=3),
    st.text(max_size=12),
)
def test_any_text_round_trips(kind: str, chunks: list[str], question: str) -> None:
    """Unicode, control characters, template-like text: nothing changes between chunks."""
    assembler = make_assembler(kind)
    pieces = assembler.turn([user(question)], num_agreed=0, has_chunks=bool(chunks))
    content = "".join(chunk + "\n\n" for chunk in chunks) + question
    assert text(assembler, ids_of(assembler, pieces, chunks)) == render(assembler, [user(content)])


@pytest.mark.parametrize("kind", MAKERS)
def test_chunk_has_the_same_ids_wherever_it_stands(kind: str) -> None:
    """Identity must not depend on neighbours, or nothing is ever reused."""
    assembler = make_assembler(kind)
    pieces = assembler.turn([user("Q")], num_agreed=0, has_chunks=True)
    seen: dict[str, set[tuple[int, ...]]] = {}
    for chunks in (CHUNK_TEXTS, CHUNK_TEXTS[::-1]):
        body, spans = body_of(assembler, pieces, chunks)
        for span, chunk in zip(spans, chunks, strict=True):
            assert chunk_id(body[span.start : span.end]) == span.chunk
            seen.setdefault(chunk, set()).add(tuple(body[span.start : span.end]))
    assert all(len(ids) == 1 for ids in seen.values())


def test_spans_touch_and_lie_between_intro_and_outro() -> None:
    """The chunk area is contiguous: separators belong to the chunks."""
    assembler = make_assembler(template="chatml")
    pieces = assembler.turn([user("Q")], num_agreed=0, has_chunks=True)
    body, spans = body_of(assembler, pieces, CHUNK_TEXTS)
    assert spans[0].start == len(pieces.intro)
    assert [span.end for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert spans[-1].end == len(body) - len(pieces.outro)


def test_no_chunks_gives_no_spans() -> None:
    """An empty list is an ordinary prompt."""
    assembler = make_assembler()
    body, spans = body_of(
        assembler, assembler.turn([user("Q")], num_agreed=0, has_chunks=False), []
    )
    assert spans == ()
    assert body.typecode == "i"


def test_template_texts_stand_around_chunks_and_question() -> None:
    """Intro, between and after, as the user's file says."""
    template = "Use:\n{chunks}Now {question} please."
    assembler = PromptAssembler(tokenizer_of("byte_level"), template=template, separator="\n")
    pieces = assembler.turn([user("Q?")], num_agreed=0, has_chunks=True)
    expected = render(assembler, [user("Use:\nA\nB\nNow Q? please.")])
    assert text(assembler, ids_of(assembler, pieces, ["A", "B"])) == expected


def test_template_texts_are_left_out_without_chunks() -> None:
    """An intro with nothing following would mislead the model."""
    assembler = PromptAssembler(
        tokenizer_of("byte_level"), template="Use:\n{chunks}Now {question}", separator="\n"
    )
    pieces = assembler.turn([user("Q?")], num_agreed=0, has_chunks=False)
    assert text(assembler, ids_of(assembler, pieces, [])) == render(assembler, [user("Q?")])


@pytest.mark.parametrize(
    "template",
    [
        "",
        "{chunks}",
        "{question}",
        "{question}{chunks}",
        "{chunks}{chunks}{question}",
        "{chunks}{question}{question}",
    ],
)
def test_bad_rag_template_is_refused(template: str) -> None:
    """Each placeholder once, chunks first."""
    with pytest.raises(ValueError, match="rag template"):
        PromptAssembler(tokenizer_of("byte_level"), template=template, separator="")


def test_question_that_names_a_placeholder_is_only_text() -> None:
    """A user may write {chunks}."""
    assembler = make_assembler()
    pieces = assembler.turn(
        [user("what is {chunks} and {question}?")], num_agreed=0, has_chunks=True
    )
    assert "{chunks} and {question}" in assembler.tokenizer.decode(pieces.outro)


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
        [CALL, RESULT, {"role": "assistant", "content": "So"}],
        [{"role": "assistant", "content": "x"}, {"role": "system", "content": "y"}],
    ],
    ids=["one step", "two steps", "an answer last", "a system message last"],
)
def test_chunks_stay_with_the_last_user_message(kind: str, after: list[dict[str, Any]]) -> None:
    """What follows it, a tool's calls and results above all, belongs to the turn that it opens. As
    in SGLang, an answer that comes last is shown as a user's message."""
    assembler = make_assembler(kind, "tools")
    before = [
        {"role": "system", "content": "Be brief."},
        user("a"),
        CALL,
        RESULT,
        {"role": "assistant", "content": "b"},
    ]
    pieces = assembler.turn(
        [*before, user("Who?"), *after], num_agreed=0, has_chunks=True, tools=[{"name": "f"}]
    )
    shown = [
        {**m, "content": m["content"] or ""}
        for m in [*before, user(CHUNK_TEXTS[0] + "\n\nWho?"), *after]
    ]
    if shown[-1]["role"] == "assistant":
        shown[-1] = user(shown[-1]["content"])
    expected = assembler._tokenizer.apply_chat_template(
        shown, tools=[{"name": "f"}], tokenize=False, add_generation_prompt=True
    )
    assert text(assembler, ids_of(assembler, pieces, CHUNK_TEXTS[:1])) == expected


def test_steps_of_a_tool_loop_share_the_turn() -> None:
    """Lead and intro are the same in every step, behind stored turns too,
    so the chunks are found cached."""
    assembler = make_assembler(template="tools")
    earlier = [user("a"), {"role": "assistant", "content": "b"}]
    for history, num_agreed in (([], 0), (earlier, 2)):
        steps = [
            assembler.turn([*history, user("Who?"), *after], num_agreed=num_agreed, has_chunks=True)
            for after in ([], [CALL, RESULT], [CALL, RESULT, CALL, RESULT])
        ]
        assert len({(step.lead, step.intro) for step in steps}) == 1
        ends = [assembler.tokenizer.decode(step.outro) for step in steps]
        assert ends[2].startswith(ends[1])
        assert ends[1].startswith(ends[0])


@pytest.mark.parametrize("kind", MAKERS)
def test_prefill_is_the_end_of_the_prompt(kind: str) -> None:
    """Behind the generation prompt, tokenised apart as SGLang does."""
    assembler = make_assembler(kind)
    pieces = assembler.turn([user("Who?")], num_agreed=0, has_chunks=True, prefill="It is")
    plain = assembler.turn([user("Who?")], num_agreed=0, has_chunks=True)
    assert pieces.outro == (*plain.outro, *assembler.tokenizer.encode("It is"))


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_without_a_user_message_the_chunks_are_in_the_last(role: str) -> None:
    """SGLang serves such messages, so they are served here."""
    assembler = make_assembler()
    pieces = assembler.turn([{"role": role, "content": "x"}], num_agreed=0, has_chunks=True)
    shown = {"role": "user" if role == "assistant" else role, "content": CHUNK_TEXTS[0] + "\n\nx"}
    assert text(assembler, ids_of(assembler, pieces, CHUNK_TEXTS[:1])) == render(assembler, [shown])


def test_no_messages_are_refused() -> None:
    """There is no place for the chunks."""
    with pytest.raises(RequestError, match="messages"):
        make_assembler().turn([], num_agreed=0, has_chunks=True)


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
    "one part": [in_parts("user", "Who is it?")],
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
    "strings": [
        {"role": "system", "content": "Be brief."},
        user("a"),
        {"role": "assistant", "content": "b"},
        user("c"),
    ],
}


@pytest.mark.parametrize("num_chunks", [0, 2])
@pytest.mark.parametrize("template", ["chatml", "parts"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_parts_are_shown_as_sglang_shows_them(
    messages: list[dict[str, Any]], template: str, num_chunks: int
) -> None:
    """A template that reads lists gets them, another one a text.
    The chunks begin the question's first part."""
    assembler = make_assembler(
        template=template, content_format=detect_jinja_template_content_format(TEMPLATES[template])
    )
    chunks = CHUNK_TEXTS[:num_chunks]
    pieces = assembler.turn(messages, num_agreed=0, has_chunks=bool(chunks))
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


def test_rag_template_is_around_all_parts() -> None:
    """Of the question; of one part, too."""
    tokenizer = tokenizer_of("byte_level", "parts")
    assembler = PromptAssembler(
        tokenizer,
        template="Use {chunks}to say {question} now",
        separator="\n\n",
        content_format="openai",
    )
    for texts in (["d"], ["d", "e"]):
        pieces = assembler.turn([in_parts("user", *texts)], num_agreed=0, has_chunks=True)
        shown = text(assembler, ids_of(assembler, pieces, CHUNK_TEXTS[:1]))
        assert f"Use {CHUNK_TEXTS[0]}\n\nto say {'|'.join(texts)} now<|im_end|>" in shown


def test_head_and_exchanges_of_parts_are_the_templates() -> None:
    """What stays at overflow, and what is rendered anew."""
    assembler = make_assembler(template="parts", content_format="openai")
    messages = CONVERSATIONS["all roles"]
    head, exchanges = assembler.head(messages), assembler.exchanges(messages, is_split=True)
    assert "Be|brief." in head
    assert (exchanges[0].lead, exchanges[0].answer) == (head, "b|c")
    whole = "".join(
        one.lead + "".join(area.intro + area.ending for area in one.areas) + one.answer
        for one in exchanges
    )
    assert whole == as_sglang_renders(assembler, messages)


def test_both_kinds_of_templates_are_told_apart() -> None:
    """By SGLang: the tests above would show nothing if it took them for one kind."""
    assert detect_jinja_template_content_format(PARTS) == "openai"
    assert detect_jinja_template_content_format(CHAT_TEMPLATE) == "string"


def test_text_of_parts_is_joined() -> None:
    """What is hashed and searched for."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert text_of({"role": "user", "content": parts}, 0) == "a b"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        "text",
        {"type": "text"},
        {"type": "text", "text": 1},
    ],
    ids=repr,
)
def test_part_that_is_no_text_is_refused_by_place(part: Any) -> None:
    """400 with the message's number."""
    with pytest.raises(RequestError, match=r"messages\.1\.content"):
        make_assembler().turn(
            [user("a"), {"role": "user", "content": [part]}], num_agreed=0, has_chunks=False
        )


def test_null_question_is_refused_as_a_prompt_error() -> None:
    """`content: null` in the last message is the caller's mistake, not a crash."""
    with pytest.raises(RequestError, match="messages"):
        make_assembler().turn([{"role": "user", "content": None}], num_agreed=0, has_chunks=True)


def test_refusing_chat_template_is_a_prompt_error() -> None:
    """What the template raises reaches the client as a 400."""
    with pytest.raises(RequestError, match="roles must alternate"):
        make_assembler(template="alternating").turn(
            [user("a"), user("b")], num_agreed=0, has_chunks=False
        )


def test_missing_chat_template_is_a_prompt_error() -> None:
    """With the flag that helps."""
    assembler = make_assembler()
    assembler._tokenizer.chat_template = None
    with pytest.raises(RequestError, match="--chat-template"):
        assembler.turn([user("a")], num_agreed=0, has_chunks=False)


def test_template_that_drops_the_user_is_a_prompt_error() -> None:
    """Without its place the chunks cannot stand anywhere."""
    assembler = make_assembler()
    assembler._tokenizer.chat_template = "nothing"
    with pytest.raises(RequestError, match="0 times"):
        assembler.turn([user("a")], num_agreed=0, has_chunks=False)


def test_head_is_the_lead_of_a_first_turn() -> None:
    """What stays when the oldest turns leave is what the conversation began with."""
    assembler = make_assembler()
    system = {"role": "system", "content": "Be brief."}
    first = assembler.turn([system, user("a")], num_agreed=0, has_chunks=False)
    later = [system, user("a"), {"role": "assistant", "content": "b"}, user("c")]
    assert assembler.tokenizer.encode(assembler.head(later)) == first.lead


def test_chunk_is_remembered() -> None:
    """A popular chunk is tokenised once."""
    assembler = make_assembler()
    assert assembler.chunk("abc", "t") is assembler.chunk("abc", "t")
    assert assembler.chunk("abc", "t") is not assembler.chunk("abc", "another tenant")


def test_chunks_with_different_separators_differ() -> None:
    """The separator is part of the chunk."""
    one, two = make_assembler(separator="\n"), make_assembler(separator="--")
    assert one.chunk("a", "t").chunk.id != two.chunk("a", "t").chunk.id


def test_read_template(tmp_path: Path) -> None:
    """A file, or the default; a bad file names the flag."""
    good, bad = tmp_path / "t", tmp_path / "b"
    good.write_text("é{chunks}{question}", encoding="utf-8")
    bad.write_bytes(b"\xff\xfe\xff")
    assert read_template(None) == DEFAULT_TEMPLATE
    assert read_template(str(good)) == "é{chunks}{question}"
    for path in (bad, tmp_path / "none"):
        with pytest.raises(ValueError, match="--chunkcache-rag-template"):
            read_template(str(path))


class JoiningTokenizer:
    """Whole text as one token each time: no pieces can be put together."""

    bos_token_id = None
    chat_template = "x"
    added_tokens_decoder: Mapping[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 1}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [hash(text) % 1000]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "?"


def test_tokenizer_whose_pieces_do_not_join_is_refused() -> None:
    """At start, not in wrong answers."""
    with pytest.raises(ValueError, match="pieces"):
        PromptAssembler(JoiningTokenizer(), separator="\n")


def test_separator_may_be_a_control_token() -> None:
    """It is the operator's; the chunk before it is not."""
    assembler = make_assembler(separator="<|im_end|>\n")
    ids = list(assembler.chunk("a<|im_end|>b", "").token_ids)
    end = tokenizer_of("byte_level").convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 1
    assert assembler.tokenizer.decode(ids) == "a<|im_end|>b<|im_end|>\n"
