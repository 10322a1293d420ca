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
from dataclasses import replace
from typing import Any, NamedTuple

from eval.logs.call import Call, Document, Message, UnreadError, seconds_of, text_of

Row = Mapping[str, Any]
DOCUMENTS = ("gen_ai.retrieval.documents", "retrieval.documents")
RERANKED = ("reranker.output_documents",)
MESSAGES = ("gen_ai.input.messages", "llm.input_messages", "gen_ai.prompt")
MODEL_CALLS = ("chat", "text_completion", "generate_content", "LLM")
KINDS = ("gen_ai.operation.name", "openinference.span.kind")
TOOLS = ("gen_ai.tool.definitions", "llm.tools")
MODELS = ("gen_ai.request.model", "llm.model_name")
TRACELOOP = "traceloop"
_OWN = f"{TRACELOOP}.association.properties"
CONVERSATIONS = ("gen_ai.conversation.id", "session.id", f"{_OWN}.session_id", f"{_OWN}.thread_id")
USERS = ("user.id", "enduser.id", f"{_OWN}.user_id")
IDS = (("traceId", "trace_id"), ("spanId", "span_id"), ("parentSpanId", "parent_id"))
"""OTLP's name, an SDK's."""


class Span(NamedTuple):
    """`start`: seconds since 1970. `documents`: retrieved, or kept by a reranker. `call`: None: it
    is of no model. `line`: of the file."""

    trace: str
    id: str
    parent: str
    start: float
    documents: tuple[Document, ...]
    is_reranked: bool
    call: Call | None
    line: int


def is_spans(row: Row) -> bool:
    """Whether a line has spans, of whatever kind."""
    ids = {"context", "traceId", "trace_id", "spanId"}
    return "resourceSpans" in row or (
        isinstance(row.get("attributes"), dict | list)
        and bool(ids & row.keys())
        and not {"messages", "request", "body"} & row.keys()  # a gateway's line in a trace
    )


def spans_of(row: Row, line: int) -> Iterator[Span]:
    """Those on a line that tell of documents or a model call. Raises UnreadError: it has none."""
    scopes = (
        each
        for resource in _rows(row.get("resourceSpans"))
        for each in _rows(resource.get("scopeSpans"))
    )
    listed = [span for scope in scopes for span in _rows(scope.get("spans"))]
    listed = listed if "resourceSpans" in row else [row]
    if not listed:
        raise UnreadError("resourceSpans without spans")
    for each in listed:
        context = _object(each.get("context"))
        trace, name, parent = (
            str(each.get(otlp) or context.get(sdk) or each.get(sdk) or "") for otlp, sdk in IDS
        )
        start = seconds_of(each.get("startTimeUnixNano") or each.get("start_time")) or 0.0
        told = _tree(_attributes(each.get("attributes")))
        for event in _rows(each.get("events")):
            _add_event(told, str(event.get("name")), _tree(_attributes(event.get("attributes"))))
        documents, call = _documents(told), _call(told, start) if _is_model_call(told) else None
        if documents or call:
            is_reranked = _get(told, *RERANKED) is not None
            trace = trace or f"{name} of {line}"
            yield Span(trace, name, parent, start, documents, is_reranked, call, line)


def calls_of(spans: Iterable[Span]) -> Iterator[tuple[Call, int]]:
    """The model calls of all traces, each with its line; of a trace without one, its retrieval."""
    traces: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        traces.setdefault(span.trace, []).append(span)
    for trace in traces.values():
        yield from _calls_of_trace(trace)


# Private, in order of use


def _documents(told: Row) -> tuple[Document, ...]:
    listed, found = _get(told, *RERANKED, *DOCUMENTS), []
    if listed is None:  # OpenLLMetry's spans have a retriever's output as it is
        listed = _object(_parsed(_get(told, f"{TRACELOOP}.entity.output"))).get("documents")
    for each in _rows(listed):
        row = _object(each.get("document")) or each
        text = text_of(row.get("content") or row.get("text") or row.get("page_content"))
        if text.strip() or row.get("id") is not None:
            name = "" if row.get("id") is None else str(row["id"])
            found.append(Document(name, text if text.strip() else None))
    return tuple(found)


def _is_model_call(told: Row) -> bool:
    kind = _get(told, *KINDS)
    return _get(told, *MESSAGES) is not None if kind is None else kind in MODEL_CALLS


def _call(told: Row, start: float) -> Call:
    system = text_of(_parsed(_get(told, "gen_ai.system_instructions")))
    messages = [Message("system", system)] if system else []
    for each in _rows(_get(told, *MESSAGES)):
        row = _object(each.get("message")) or each
        contents = [part.get("message_content") for part in _rows(row.get("contents"))]
        text = text_of(row.get("content") or row.get("parts") or contents)
        messages.append(Message(str(row.get("role") or "user"), text))
    tools, model = _parsed(_get(told, *TOOLS)), _get(told, *MODELS)
    conversation, user = (
        None if (value := _get(told, *names)) is None else str(value)
        for names in (CONVERSATIONS, USERS)
    )
    return Call(
        tuple(messages),
        model=str(model or ""),
        tools=json.dumps(tools, sort_keys=True) if tools else "",
        timestamp=start or None,
        conversation=conversation,
        user=user,
    )


def _get(told: Row, *names: str) -> Any:
    """The first of these attributes that there is; None: there is none."""
    for name in names:
        value: Any = told
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def _calls_of_trace(trace: list[Span]) -> Iterator[tuple[Call, int]]:
    retrieving = {span.id for span in trace if span.documents}
    asking = {span.id for span in trace if span.call}
    # a framework's span around the client's is the same call
    asking -= {span.parent for span in trace if span.id in asking}
    found: tuple[Document, ...] = ()
    is_new = True
    for span in trace:
        if span.documents and span.parent not in retrieving:
            found = span.documents if is_new or span.is_reranked else found + span.documents
            is_new = False
        if span.call and span.id in asking:
            yield replace(span.call, documents=found), span.line
            is_new = True
    if not asking and found:
        yield Call(documents=found, timestamp=trace[0].start or None), trace[0].line


def _attributes(given: Any) -> Iterator[tuple[str, Any]]:
    yield from given.items() if isinstance(given, dict) else ()
    for each in _rows(given) if isinstance(given, list) else ():
        yield str(each.get("key")), _value(each.get("value"))


def _value(value: Any) -> Any:
    """Of OTLP's JSON, which names the type."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, inner),) = value.items()
    values = _object(inner).get("values")
    if kind == "arrayValue":
        return [_value(each) for each in values] if isinstance(values, list) else []
    return dict(_attributes(values)) if kind == "kvlistValue" else inner


def _tree(attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """`{"a.0.b": 1}` as `{"a": {"0": {"b": 1}}}`."""
    tree: dict[str, Any] = {}
    for key, value in attributes:
        *path, last = key.split(".")
        place: Any = tree
        for part in path:
            place = place.setdefault(part, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.setdefault(last, value)
    return tree


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
    except (ValueError, RecursionError):
        return value


def _add_event(told: dict[str, Any], name: str, fields: dict[str, Any]) -> None:
    """Conventions before 1.37 have an event for each message, those before 1.28 one for all."""
    genai, given = _object(told.setdefault("gen_ai", {})), _object(fields.get("gen_ai"))
    role = name.removeprefix("gen_ai.").removesuffix(".message")
    if name == f"gen_ai.{role}.message":
        content = fields.get("content") or _parsed(_object(given.get("event")).get("content"))
        genai["prompt"] = [*_rows(genai.get("prompt")), {"role": role, "content": content}]
    elif name == "gen_ai.content.prompt":
        genai["prompt"] = given.get("prompt")
    elif name == "gen_ai.client.inference.operation.details":
        told["gen_ai"] = {**genai, **given}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _rows(value: Any) -> list[Any]:
    """The objects of a list, of one in JSON, or of an object whose keys are their places."""
    value = _parsed(value)
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=lambda key: (len(key), key))]
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
