"""SGLang frontend programs (`@sgl.function`) over retrieved chunks: the expression `chunks` and a
backend that reuses them.

    s += "Use these.\\n" + chunks(passages) + "Who?\\n" + sgl.gen("answer")

    state text   U s e   t h e s e . \\n [ passage 1 ␣ passage 2 ␣ ] W h o ? \\n
    parts sent   "Use these.\\n",        {"chunks": [1, 2]},         "Who?\\n"

The parts go to POST /rag/v1/generate.

SGLang's interpreter keeps a program's state as one string, and a fork copies that string without
telling the backend. So the string itself records where its chunk areas are (`AreaText`). It can be
appended to, sliced and forked like any other; an operation of SGLang's that loses the areas leaves
text that is sent as text. Knows no tokens and no cache.

Invariant: the texts of the parts, chunks with their separators, put together are the state's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint, compute_normalized_prompt_logprobs
from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang.lang.global_config import global_config
from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglConstantText, SglSamplingParams
from sglang.utils import http_request

from sglang_chunkcache.config import ChunkCacheConfig

ENDPOINT, RETRIEVE = "/rag/v1/generate", "/rag/v1/retrieve"
NO_ANSWER = {"max_new_tokens": 0}
"""SGLang's way to prefill without an answer."""

Part = str | dict[str, list[dict[str, Any]]]
"""One part of the endpoint's body: a text, or `{"chunks": [{"text": ..., "id": ...}, ...]}`."""


LOGPROBS = "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"
"""SGLang's parameters that stand beside the others in a body."""


class ChunkArea(NamedTuple):
    """`[start, end)` of a text, in characters, and the chunks it was made of,
    as the endpoint takes them."""

    start: int
    end: int
    chunks: tuple[dict[str, Any], ...]


class AreaText(str):
    """A string that knows which of its ranges are chunk areas.
    Areas are whole: a slice through one makes it plain text."""

    __slots__ = ("areas",)
    areas: tuple[ChunkArea, ...]

    def __new__(cls, text: str, areas: tuple[ChunkArea, ...] = ()) -> AreaText:
        made = super().__new__(cls, text)
        made.areas = areas
        return made

    def __str__(self) -> str:
        # NOTE: SGLang copies a state's text with str(), and the copy must keep its areas
        return self

    def __add__(self, other: str) -> AreaText:
        return _join(self, other)

    def __radd__(self, other: str) -> AreaText:
        return _join(other, self)

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = super().__getitem__(key)
        if not isinstance(key, slice) or key.step not in (None, 1):
            return text
        start, stop, _ = key.indices(len(self))
        inside = tuple(area for area in self.areas if area.start >= start and area.end <= stop)
        return AreaText(text, _shifted(inside, -start))


class SglChunks(SglConstantText):  # type: ignore[misc]
    """Retrieved chunks in a program.
    A constant text, since SGLang's interpreter takes no expression it does not know."""

    def __init__(self, value: AreaText) -> None:
        super().__init__(value)

    def __repr__(self) -> str:
        chunks = [chunk for area in self.value.areas for chunk in area.chunks]
        return f"Chunks({[chunk.get('id', chunk['text'][:20]) for chunk in chunks]})"


def chunks(
    passages: Sequence[str | Mapping[str, Any]],
    *,
    separator: str = ChunkCacheConfig.chunk_separator,
) -> SglChunks:
    """Retrieved chunks, best first, as an expression; add it to a state or to other expressions.

    The server may put the chunks of a prompt's first area in another order; `order` in the answer's
    `chunkcache` object tells which. The state's text keeps the order given here.

    Args:
        passages: texts, or objects with `text` and optionally `id`, which is only shown back.
        separator: the server's `--chunkcache-chunk-separator`, so that the state's text is the text
            that the model reads.
    Raises:
        TypeError: a passage that is neither. (Not ValueError: SGLang traces programs with
            placeholders for their arguments, and a TypeError ends the tracing.)
    """
    items = tuple(_chunk_in(passage) for passage in passages)
    text = "".join(item["text"] + separator for item in items)
    return SglChunks(AreaText(text, (ChunkArea(0, len(text), items),) if items else ()))


def parts_of(text: str) -> list[Part]:
    """A program's text as the endpoint takes it; text without areas is one part."""
    parts: list[Part] = []
    position = 0
    # the last one stands for the end
    for start, end, items in (*_areas(text), ChunkArea(len(text), len(text), ())):
        if position < start:
            parts.append("".join((text[position:start],)))  # a str proper
        if items:
            parts.append({"chunks": list(items)})
        position = end
    return parts


class ChunkCacheEndpoint(RuntimeEndpoint):  # type: ignore[misc]
    """Backend for `@sgl.function` programs against a server started by
    `sglang_chunkcache.launch_server`.

    For text generated after chunks, `state.get_meta_info(name)["chunkcache"]` is the answer's
    `chunkcache` object. Prompts without chunks, and prompts with images, go to SGLang's own
    `/generate`.

    Args:
        base_url: of the server, without a path.
        extra_key, cache_salt: keep caches of tenants apart, as in SGLang's requests.
        reuse, order: as in the endpoint's body, for every request; None: the server's.
        other arguments: as for RuntimeEndpoint.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        reuse: str | Mapping[str, Any] | None = None,
        order: str | None = None,
    ) -> None:
        super().__init__(base_url.rstrip("/"), api_key, verify, chat_template_name)
        # its route does not exist in SGLang 0.5.21: join by text instead
        self.support_concate_and_append = False
        named = {"extra_key": extra_key, "cache_salt": cache_salt, "reuse": reuse, "order": order}
        self._fields = {name: value for name, value in named.items() if value is not None}

    def retrieve(self, query: str, **options: Any) -> list[dict[str, Any]]:
        """The passages that the server's index (`--index`) finds for a query, best first, ready for
        `chunks`.

        Args:
            options: `k`, `mode`, `nprobe` as in the endpoint's body; the server's defaults for
                those left out.
        """
        found = self._request(RETRIEVE, {"query": query, **options}).json()
        return list(found["passages"])

    def cache_prefix(self, prefix_str: str) -> None:
        if not _areas(prefix_str):
            super().cache_prefix(prefix_str)
            return
        self._post(prefix_str, sampling_params=NO_ANSWER)

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        """Compute the state so far, so that every branch of a fork finds it cached."""
        if not self._is_ours(s):
            super().commit_lazy_operations(s)
            return
        self._post(s.text_, sampling_params=NO_ANSWER)

    def generate(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> tuple[str, dict[str, Any]]:
        if not self._is_ours(s):
            return super().generate(s, sampling_params)  # type: ignore[no-any-return]
        answer = self._post(s.text_, **self._request_fields(sampling_params)).json()
        return answer["text"], {**answer["meta_info"], "chunkcache": answer["chunkcache"]}

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """As SGLang's; the last item's meta info has the `chunkcache` object, too."""
        if not self._is_ours(s):
            yield from super().generate_stream(s, sampling_params)
            return
        response = self._post(s.text_, **self._request_fields(sampling_params), stream=True)
        num_sent = 0
        with response:
            for line in response.iter_lines():
                # The stream ends with `[DONE]`, which is no JSON.
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RuntimeError(event["error"])
                meta_info = event["meta_info"]
                if "chunkcache" in event:
                    meta_info["chunkcache"] = event["chunkcache"]
                # Each event has the whole text so far, as SGLang's own streams.
                new_text = event["text"][num_sent:]
                num_sent += len(new_text)
                yield new_text, meta_info

    def select(
        self,
        s: StreamExecutor,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        """As SGLang's, but a choice is tokenised separately from the prompt,
        so the border between them needs no healing."""
        if not self._is_ours(s):
            return super().select(s, choices, temperature, choices_method)
        assert temperature <= 1e-5
        # The prompt by itself first: every choice then finds it cached.
        prompt = self._post(s.text_, sampling_params=NO_ANSWER).json()
        body = {
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": prompt["meta_info"]["prompt_tokens"] - 1,
        }
        scored = [
            self._post(s.text_, suffix=choice, **body).json()["meta_info"] for choice in choices
        ]
        # The first entry is the prompt's last token, before the choice; it has no probability.
        input_logprobs = [meta_info["input_token_logprobs"] for meta_info in scored]
        decision = choices_method(
            choices=choices,
            normalized_prompt_logprobs=[
                compute_normalized_prompt_logprobs(entries) for entries in input_logprobs
            ],
            input_token_logprobs=[entries[1:] for entries in input_logprobs],
            output_token_logprobs=[meta_info["output_token_logprobs"] for meta_info in scored],
            unconditional_token_logprobs=self._unconditional(s, input_logprobs, choices_method),
        )
        decision.meta_info = {**(decision.meta_info or {}), "chunkcache": prompt["chunkcache"]}
        return decision

    # Private, in order of use

    def _is_ours(self, s: StreamExecutor) -> bool:
        return bool(_areas(s.text_)) and not s.images_

    def _post(self, text: str, *, suffix: str = "", **body: Any) -> Any:
        parts = [*parts_of(text), *([suffix] if suffix else [])]
        return self._request(ENDPOINT, {"parts": parts, **self._fields, **body})

    def _request(self, path: str, body: dict[str, Any]) -> Any:
        response = http_request(
            self.base_url + path,
            json=body,
            stream=bool(body.get("stream")),
            api_key=self.api_key,
            verify=self.verify,
        )
        self._assert_success(response)
        return response

    def _request_fields(self, sampling_params: SglSamplingParams) -> dict[str, Any]:
        # It writes a regex into the parameters for SGLang's `dtype`, so they are read behind it.
        self._handle_dtype_to_regex(sampling_params)
        given = {name: vars(sampling_params).get(name) for name in LOGPROBS}
        return {
            "sampling_params": {
                "skip_special_tokens": global_config.skip_special_tokens_in_output,
                "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
                **sampling_params.to_srt_kwargs(),
            },
            **{name: value for name, value in given.items() if value is not None},
        }

    def _unconditional(
        self, s: StreamExecutor, input_logprobs: list[Any], choices_method: ChoicesSamplingMethod
    ) -> list[Any] | None:
        """The choices' log probabilities without the prompt, for the methods that compare with
        them."""
        if not choices_method.requires_unconditional_logprobs:
            return None
        body = {
            "input_ids": [[entry[1] for entry in entries] for entries in input_logprobs],
            "sampling_params": NO_ANSWER,
            "return_logprob": True,
            # By default SGLang gives no probabilities of a prompt's tokens.
            "logprob_start_len": 0,
        }
        answers = self._generate_http_request(s, body)
        # The first token follows nothing, so it has no probability.
        return [answer["meta_info"]["input_token_logprobs"][1:] for answer in answers]


def _join(left: str, right: str) -> AreaText:
    if not isinstance(left, str) or not isinstance(right, str):
        return NotImplemented
    areas = (*_areas(left), *_shifted(_areas(right), len(left)))
    # `left + right` would come back to `AreaText.__add__`.
    return AreaText("".join((left, right)), areas)


def _areas(text: str) -> tuple[ChunkArea, ...]:
    return text.areas if isinstance(text, AreaText) else ()


def _shifted(areas: tuple[ChunkArea, ...], offset: int) -> tuple[ChunkArea, ...]:
    return tuple(ChunkArea(start + offset, end + offset, items) for start, end, items in areas)


def _chunk_in(passage: str | Mapping[str, Any]) -> dict[str, Any]:
    fields = {"text": passage} if isinstance(passage, str) else passage
    if not isinstance(fields, Mapping) or not isinstance(fields.get("text"), str):
        raise TypeError(
            f"a passage must be a text or an object with one under 'text', got {passage!r:.80}"
        )
    # Search results bring scores and more, which the endpoint would only throw away.
    return {name: fields[name] for name in ("text", "id") if fields.get(name) is not None}
