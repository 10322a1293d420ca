"""Requests, each of which ends a stock server:
one list for the guard's tests, with a server and without."""

from __future__ import annotations

from typing import Any, NamedTuple


class Lethal(NamedTuple):
    """A body of `/generate` and the field that is lethal in it."""

    id: str
    field: str
    body: dict[str, Any]
    overlapped: dict[str, Any] | None = None
    """A good request that must run at the same time."""
    before: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Good requests, with their endpoints, that must have run."""
    is_unchecked: bool = False
    """It goes to an endpoint that checks no types: from 0.5.22 on `/generate` does."""
    has_adapters: bool = False
    """It ends a server that has the adapter `a`."""
    mode: str = "null"
    """Of the server that it ends: SGLang's `disaggregation_mode`."""

    @property
    def is_alone(self) -> bool:
        """It is for a server without a partner."""
        return self.mode == "null"

    @property
    def is_for_gpus(self) -> bool:
        """SGLang has what it is for on GPUs alone."""
        return self.has_adapters or not self.is_alone

    def sent(self, *, stream: bool | None = None) -> tuple[str, dict[str, Any]]:
        """Endpoint and what is posted to it."""
        body = self.body if stream is None else {**self.body, "stream": stream}
        if not self.is_unchecked:
            return "/generate", body
        rest = {name: value for name, value in body.items() if name != "text"}
        return "/vertex_generate", {"instances": [{"text": body["text"]}], "parameters": rest}


TEXT = "Which city does the company Lumum serve?"
MEET = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9}


def sampling(
    id: str, *, overlapped: dict[str, Any] | None = None, stream: bool = False, **params: Any
) -> Lethal:
    """A case in `sampling_params`; the first parameter is the lethal one."""
    field = f"sampling_params.{next(iter(params))}"
    body = {"text": TEXT, "stream": stream, "sampling_params": {"max_new_tokens": 4} | params}
    return Lethal(id, field, body, overlapped, is_unchecked=True)


def request(id: str, **fields: Any) -> Lethal:
    """A case beside `sampling_params`; the first field is the lethal one."""
    return Lethal(
        id, next(iter(fields)), {"text": TEXT, "sampling_params": {"max_new_tokens": 4}} | fields
    )


def in_session(id: str, **params: Any) -> Lethal:
    """A case in `session_params`, of a session that has had two requests."""
    before = [
        (
            "/generate",
            {
                "text": TEXT,
                "rid": rid,
                "sampling_params": {"max_new_tokens": 1},
                "session_params": {"id": "s"},
            },
        )
        for rid in ("r", "q")
    ]
    case = request(id, session_params={"id": "s", **params})
    return case._replace(
        before=(("/open_session", {"capacity_of_str_len": 1000, "session_id": "s"}), *before)
    )


LETHAL = [
    sampling("skip_special_tokens a string", skip_special_tokens="x"),
    sampling("skip_special_tokens a number", skip_special_tokens=1),
    sampling("logit_bias a string", logit_bias="5"),
    sampling("logit_bias of strings", logit_bias={"5": "x"}),
    sampling("logit_bias over 32 bits", logit_bias={"5": 1e308}, top_k=5),
    sampling(
        "logit_bias over 32 bits by the temperature",
        logit_bias={"5": 1e38},
        temperature=1e-4,
        top_k=5,
    ),
    sampling("repetition_penalty", repetition_penalty=1e-40, top_k=5),
    sampling("top_k over 32 bits", top_k=2**31, temperature=1),
    sampling("top_k a fraction", top_k=1.5),
    sampling(
        "temperature over 32 bits", temperature=1e308, top_k=5, min_new_tokens=2, ignore_eos=True
    ),
    sampling("min_new_tokens beside a regex", min_new_tokens=2, regex="x", top_k=5),
    sampling(
        "min_new_tokens beside a schema", min_new_tokens=2, json_schema='{"const": 1}', top_k=5
    ),
    sampling("stop of lists", stop=[["x"]]),
    sampling("max_new_tokens a fraction", max_new_tokens=1.5, ignore_eos=True),
    sampling("beam_width a fraction", beam_width=2.0),
    sampling("stop_token_ids negative", stop_token_ids=[-1], min_new_tokens=2),
    sampling("stop_token_ids over the vocabulary", stop_token_ids=[5000], min_new_tokens=2),
    sampling("stop_token_ids of all", stop_token_ids=[*range(1101)], min_new_tokens=2, top_k=5),
    sampling("stop_token_ids behind a null", stop_token_ids=[None, 5000], min_new_tokens=2),
    sampling(
        "stop_token_ids beside min_new_tokens",
        overlapped={
            "text": TEXT,
            "sampling_params": {"max_new_tokens": 2000, "min_new_tokens": 2000, "temperature": 1},
        },
        stop_token_ids=[5000],
    ),
    sampling("stream_interval a string", stream_interval="x", ignore_eos=True, stream=True),
    sampling("stop_regex", stop_regex="(a+)+b", regex="a{400}", max_new_tokens=400),
    sampling("stop_regex of branches", stop_regex="(a|aa)+b", regex="a{400}", max_new_tokens=400),
    sampling("is_normalized", is_normalized=True, temperature=0, top_k=5),
    sampling("regex an object", regex={"a": 1}),
    sampling("json_schema an object", json_schema={"type": "object"}),
    sampling("ebnf a list", ebnf=["a"]),
    sampling("structural_tag an object", structural_tag={"type": "structural_tag"}),
    request("input_ids negative", input_ids=[-1], text=None),
    request("input_ids over the vocabulary", input_ids=[5000], text=None),
    request("input_ids empty in a batch", input_ids=[[]], text=None),
    request("logprob_start_len negative", logprob_start_len=-5, return_logprob=True),
    request(
        "top_logprobs_num over the vocabulary", top_logprobs_num=1_000_000, return_logprob=True
    ),
    request(
        "top_logprobs_num in a batch with another's logprobs",
        top_logprobs_num=[2 if i % 2 else 1_000_000 for i in range(16)],
        return_logprob=[bool(i % 2) for i in range(16)],
        text=[f"{TEXT} {i}" for i in range(16)],
        sampling_params={"max_new_tokens": 16, "ignore_eos": True},
    ),
    request("priority over 64 bits", priority=2**63),
    request("session_id a number", session_id=2)._replace(is_unchecked=True),
    request("rid a number", rid=[-1])._replace(is_unchecked=True),
    request("received_time a string", received_time="x")._replace(is_unchecked=True),
    request("return_hidden_states empty", return_hidden_states=[]),
    request("positional_embed_overrides of null", positional_embed_overrides=[None]),
    request("session id a list", session_params={"id": ["x"]}),
    in_session("session rid a list", rid=["r"]),
    in_session("session offset a string", rid="r", offset="x"),
    in_session("session replaced whole", replace=True),
    request("lora_id a list", lora_id=["x"]),
    request("lora_path a list", lora_path=["a"])._replace(has_adapters=True),
    request("bootstrap_room a list", bootstrap_room=[1], **MEET)._replace(mode="prefill"),
    request("bootstrap_room a list, decoding", bootstrap_room=[1], **MEET)._replace(mode="decode"),
    request("bootstrap_room without host", bootstrap_room=1)._replace(mode="decode"),
    request("bootstrap_host a list", bootstrap_host=["127.0.0.1"], bootstrap_room=1)._replace(
        mode="decode"
    ),
    request("positional_embed_overrides", positional_embed_overrides=[]),
    request("custom_labels unknown", custom_labels={"x": "y"}),
    Lethal(
        "token_indices_to_pool of a cached prompt",
        "token_indices_to_pool",
        {"text": TEXT, "sampling_params": {"max_new_tokens": 0}, "token_indices_to_pool": [1]},
        before=(("/generate", {"text": TEXT}),),
    ),
]
