"""OpenTelemetry spans of retrievals and model calls, by OpenTelemetry's GenAI conventions (1.27 to
today's), OpenInference's or OpenLLMetry's.

A line is what the collector's file exporter writes, `{"resourceSpans": [...]}`, or one span as
OpenTelemetry's SDKs print it, with `attributes` as an object. Spans of a trace belong together,
wherever they are in the file. A model call has the documents that its trace has retrieved since the
call before it; of a reranker those that it has kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from eval.logs.call import Call, Document, Message, seconds_of, text_of

Row = Mapping[str, Any]
DOCUMENTS = ("gen_ai.retrieval.documents", "retrieval.documents")
RERANKED = "reranker.output_documents"
MESSAGES = ("gen_ai.input.messages", "llm.input_messages", "gen_ai.prompt")
MODEL_CALLS = ("chat", "text_completion", "generate_content", "LLM")
CONVERSATIONS = (
    *("gen_ai.conversation.id", "session.id"),
    "traceloop.association.properties.session_id",
)
USERS = ("user.id", "enduser.id", "traceloop.association.properties.user_id")
MODELS = ("gen_ai.request.model", "llm.model_name")


class Span(NamedTuple):
    """`start`: seconds since 1970. `line`: of the file."""

    trace: str
    id: str
    parent: str
    start: float
    told: Row
    line: int


def spans_of(row: Row, line: int) -> Iterator[Span]:
    """Those on a line that tell of documents or a model call; none on a line of another kind."""
    listed = [
        span
        for resource in _list(row.get("resourceSpans"))
        for scope in _list(resource.get("scopeSpans"))
        for span in _list(scope.get("spans"))
    ]
    for each in listed or ([row] if _is_span(row) else []):
        told = dict(_attributes(each.get("attributes")))
        for event in _list(each.get("events")):
            _add_event(told, event)
        context = each.get("context") or {}
        trace = str(each.get("traceId") or context.get("trace_id") or "")
        name = str(each.get("spanId") or context.get("span_id") or "")
        parent = str(each.get("parentSpanId") or each.get("parent_id") or "")
        start = seconds_of(each.get("startTimeUnixNano") or each.get("start_time"))
        if _has_documents(told) or _is_model_call(told):
            yield Span(trace, name, parent, start or 0.0, told, line)


def is_spans(row: Row) -> bool:
    """Whether a line has spans, of whatever kind."""
    return "resourceSpans" in row or _is_span(row)


def calls_of(spans: Iterable[Span]) -> Iterator[tuple[Call, int]]:
    """The model calls of all traces, each with its line; of a trace without one, its retrieval."""
    traces: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        traces.setdefault(span.trace or f"{span.id} of {span.line}", []).append(span)
    for trace in traces.values():
        yield from _calls_of_trace(trace)


# Private, in order of use


def _calls_of_trace(trace: list[Span]) -> Iterator[tuple[Call, int]]:
    retrieving = {span.id for span in trace if _has_documents(span.told)}
    asking = {span.id for span in trace if _is_model_call(span.told)}
    # a framework's span around the client's is the same call
    asking -= {span.parent for span in trace if span.id in asking}
    found: list[Document] = []
    is_new = True
    for span in trace:
        if span.id in retrieving and span.parent not in retrieving:
            kept = [] if is_new or RERANKED in span.told or _keys(span.told, RERANKED) else found
            found, is_new = [*kept, *_documents(span.told)], False
        if span.id in asking:
            yield _call(span, tuple(found)), span.line
            is_new = True
    if not asking and found:
        yield _call(trace[0], tuple(found)), trace[0].line


def _call(span: Span, documents: tuple[Document, ...]) -> Call:
    told = span.told
    system = text_of(_parsed(told.get("gen_ai.system_instructions")))
    lead = (Message("system", system),) if system else ()
    names = [
        next((str(told[name]) for name in of if told.get(name)), None)
        for of in (CONVERSATIONS, USERS, MODELS)
    ]
    tools = told.get("gen_ai.tool.definitions") or told.get("llm.tools")
    return Call(
        (*lead, *_messages(told)) if _is_model_call(told) else (),
        documents,
        model=names[2] or "",
        tools=json.dumps(_parsed(tools), sort_keys=True) if tools else "",
        timestamp=span.start or None,
        conversation=names[0],
        user=names[1],
    )


def _is_span(row: Row) -> bool:
    return isinstance(row.get("attributes"), dict | list) and bool(
        {"context", "traceId", "trace_id", "spanId"} & row.keys()
    )


def _attributes(given: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(given, dict):
        yield from given.items()
    for each in _list(given):
        yield str(each.get("key")), _value(each.get("value"))


def _value(value: Any) -> Any:
    """Of OTLP's JSON, which names the type."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in _list(inner.get("values"))]
    return dict(_attributes(inner.get("values"))) if kind == "kvlistValue" else inner


def _add_event(told: dict[str, Any], event: Row) -> None:
    """Conventions before 1.37 have an event for each message, those before 1.28 one for all."""
    name, fields = str(event.get("name")), dict(_attributes(event.get("attributes")))
    role = name.removeprefix("gen_ai.").removesuffix(".message")
    if name == f"gen_ai.{role}.message":
        content = fields.get("content") or _parsed(fields.get("gen_ai.event.content"))
        told.setdefault("gen_ai.prompt", []).append({"role": role, "content": content})
    elif name == "gen_ai.content.prompt":
        told["gen_ai.prompt"] = fields.get("gen_ai.prompt")
    elif name == "gen_ai.client.inference.operation.details":
        told.update(fields)


def _has_documents(told: Row) -> bool:
    return any(name in told or _keys(told, name) for name in (*DOCUMENTS, RERANKED))


def _is_model_call(told: Row) -> bool:
    kind = told.get("gen_ai.operation.name") or told.get("openinference.span.kind")
    if kind is not None:
        return kind in MODEL_CALLS
    return any(name in told or _keys(told, name) for name in MESSAGES)


def _messages(told: Row) -> list[Message]:
    for name in MESSAGES:
        if rows := _rows(told, name):
            return [
                Message(str(row.get("role") or "user"), text_of(_content(row)))
                for each in rows
                if (row := _short(each, "message"))
            ]
    return []


def _content(row: Row) -> Any:
    listed = [row[name] for name in sorted(row) if name.endswith("message_content.text")]
    return row.get("content") or row.get("parts") or row.get("contents") or listed


def _documents(told: Row) -> list[Document]:
    rows = next((rows for name in (RERANKED, *DOCUMENTS) if (rows := _rows(told, name))), [])
    found = []
    for each in rows:
        row = _short(each, "document")
        text = text_of(row.get("content") or row.get("text"))
        if text.strip() or row.get("id") is not None:
            found.append(Document(str(row.get("id") or ""), text if text.strip() else None))
    return found


def _rows(told: Row, name: str) -> list[Row]:
    """A list of objects, as such, as JSON, or as `name.0.field`."""
    if name in told:
        return _list(_parsed(told[name]))
    rows: dict[int, dict[str, Any]] = {}
    for key in _keys(told, name):
        place, _, field = key.removeprefix(f"{name}.").partition(".")
        if place.isdigit():
            rows.setdefault(int(place), {})[field] = told[key]
    return [rows[place] for place in sorted(rows)]


def _keys(told: Row, name: str) -> list[str]:
    return [key for key in told if key.startswith(f"{name}.")]


def _short(row: Row, kind: str) -> dict[str, Any]:
    """OpenInference's `document.id` is `id`."""
    inner = row.get(kind)
    given = inner if isinstance(inner, dict) else row
    return {key.removeprefix(f"{kind}."): value for key, value in given.items()}


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            pass
    return value


def _list(value: Any) -> list[Any]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
