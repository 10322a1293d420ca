"""Every name and signature of SGLang that we touch. Red here after an upgrade says what to look at;
nothing else need fail.

The bases that we subclass are also subclassed here by an outsider, so that a new abstract method
shows.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang
import torch
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers import (
    data_parallel_controller,
    detokenizer_manager,
    scheduler,
    tokenizer_manager,
)
from sglang.srt.managers.io_struct import GenerateReqInput, GetInternalStateReqOutput
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.mem_cache import common, registry
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import kill_process_tree
from sglang.srt.utils.auth import AuthLevel, auth_level, decide_request_auth

import sglang_chunkcache
from sglang_chunkcache.front.drain import HEALTH, READY

VERSION = "0.5.21"
PACKAGE = Path(sglang_chunkcache.__file__).parent


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters, `self` left out;
    `*` marks where keyword-only ones begin."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names[1:] if names[:1] == ["self"] else names


def test_version() -> None:
    """The pin of pyproject.toml; what is asserted below was read in this release."""
    assert sglang.__version__.startswith(VERSION)


def sglang_imports() -> list[tuple[str, str]]:
    """(module, name) of every import from SGLang in our package."""
    found: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                found.update((str(node.module), alias.name) for alias in node.names)
    return sorted(found)


@pytest.mark.parametrize(("module", "name"), sglang_imports())
def test_imported_name_exists(module: str, name: str) -> None:
    """Also those inside functions and for type checking only,
    which nothing else would notice before a server starts."""
    container = importlib.import_module(module)
    assert hasattr(container, name) or importlib.import_module(f"{module}.{name}")


# The cache


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("match_prefix", ["params"]),
        ("insert", ["params"]),
        ("cache_unfinished_req", ["req", "chunked"]),
        ("insert_req", ["req", "*", "up_to"]),
        ("reset", []),
        ("evict", ["params"]),
        ("inc_lock_ref", ["node"]),
        ("dec_lock_ref", ["node", "params"]),
        ("evictable_size", []),
        ("protected_size", []),
        ("_insert_cache", ["req", "token_ids", "*", "chunked", "key_limit", "split_prompt"]),
        ("_insert_helper", ["node", "key", "value", "priority", "chunked"]),
        ("_delete_leaf", ["node"]),
        ("_split_node", ["key", "child", "split_len"]),
        ("_match_prefix_helper", ["node", "key"]),
    ],
)
def test_radix_cache_method(name: str, expected: list[str]) -> None:
    """What we override or call."""
    assert parameters(getattr(RadixCache, name)) == expected


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (MatchPrefixParams, {"key", "req"}),
        (InsertParams, {"key", "value", "priority", "chunked"}),
        (InsertResult, {"prefix_len", "last_device_node"}),
        (
            CacheInitParams,
            {"disable", "req_to_token_pool", "token_to_kv_pool_allocator", "page_size", "is_eagle"},
        ),
        (
            ReqKvInfo,
            {"req_pool_idx", "cache_protected_len", "kv_committed_len", "kv_allocated_len"},
        ),
        (registry.TreeCacheBuildContext, {"params", "server_args", "tp_worker", "tp_rank"}),
        (
            GenerateReqInput,
            {
                "input_ids",
                "sampling_params",
                "stream",
                "return_logprob",
                "logprob_start_len",
                "top_logprobs_num",
                "extra_key",
                "cache_salt",
                "routed_dp_rank",
                "return_text_in_logprobs",
                "custom_logit_processor",
                "log_metrics",
            },
        ),
        (LoadSnapshot, {"num_waiting_reqs"}),
        (
            ServerArgs,
            {
                "dp_size",
                "device",
                "page_size",
                "tokenizer_worker_num",
                "disable_radix_cache",
                "speculative_algorithm",
                "enable_hierarchical_cache",
                "disaggregation_mode",
                "skip_tokenizer_init",
                "enable_metrics",
                "api_key",
                "admin_api_key",
                "enable_memory_saver",
                "radix_cache_backend",
            },
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dataclass_has_fields(cls: Any, fields: set[str]) -> None:
    """Fields that we read or set by name; some are msgspec structs."""
    names = getattr(cls, "__struct_fields__", None) or [f.name for f in dataclasses.fields(cls)]
    assert fields <= set(names)


def test_match_result_fields() -> None:
    """`_replace` and names, as our tests use them."""
    assert {"device_indices", "last_device_node", "host_hit_length"} <= set(MatchResult._fields)


@pytest.mark.parametrize(
    "path",
    [
        "sampling_params",
        "origin_input_ids",
        "output_ids",
        "extra_key",
        "cache_salt",
        "customized_info",
        "priority",
        "last_node",
        "prefix_indices",
        "kv",
    ],
)
def test_req_sets_attribute(path: str) -> None:
    """Read or written by us. `Req` has no `__slots__`, so we may set attributes of our own."""
    assert f"self.{path}" in inspect.getsource(Req)
    assert not hasattr(Req, "__slots__")


def test_custom_params_reach_the_scheduler_unchecked() -> None:
    """SGLang passes on whatever JSON a client sends, so our reader must bear anything."""
    assert SamplingParams(custom_params="text").custom_params == "text"


def test_radix_key_parts() -> None:
    """`limit` caps without slicing. An empty salt is none. A key is one array and a namespace."""
    from array import array

    key = RadixKey(array("q", [1, 2, 3]), "x", limit=2, cache_salt="")
    assert (len(key), key.extra_key, key.cache_salt, key.is_bigram) == (2, "x", None, False)
    assert parameters(RadixKey.match) == ["other", "page_size"]
    assert parameters(RadixKey.child_key) == ["page_size"]
    assert parameters(RadixKey._check_compatible) == ["other"]
    assert key.page_aligned(1) is key


def test_radix_cache_uses_the_key_only_by_methods_we_override() -> None:
    """`child_key_at` and `match_at` would go past a chunk."""
    source = inspect.getsource(RadixCache)
    assert "child_key_at(" not in source
    assert "match_at(" not in source


def test_cache_unfinished_req_matches_the_key_that_was_inserted() -> None:
    """It matches again by the very key `_insert_cache` gave back, without the request;
    and trusts its length."""
    source = inspect.getsource(RadixCache.cache_unfinished_req)
    assert "self.match_prefix(MatchPrefixParams(key=radix_key))" in source
    assert "self._insert_cache(" in source
    assert "req.kv.cache_protected_len = len(radix_key)" in inspect.getsource(RadixCache.insert_req)


def test_request_without_a_tree_keeps_its_slots() -> None:
    """As audits do in our tree: the next piece of a prompt begins where `prefix_indices` ends."""
    source = inspect.getsource(ChunkCache.cache_unfinished_req)
    assert "req.prefix_indices = kv_indices.to(dtype=torch.int64, copy=True)" in source
    assert inspect.getsource(ChunkCache.insert_req).strip().endswith("pass")


def test_waiting_requests_are_told() -> None:
    """Those that the rank's own answer counts, and the load report that is asked first."""
    assert "self.waiting_queue" in inspect.getsource(Scheduler)
    assert "self.chunked_req" in inspect.getsource(Scheduler)
    source = inspect.getsource(TokenizerManager)
    assert "self.load_snapshot_reader =" in source
    assert "self.preferred_sampling_params =" in source


def test_logprobs_limit_the_match() -> None:
    """A prefix ends where logprobs begin, so an audit may use the exact KV of the prompt's last
    token but one."""
    assert "min(max_prefix_len, self.logprob_start_len)" in inspect.getsource(
        Req._compute_max_prefix_len
    )


def test_release_inserts_then_frees_then_unlocks() -> None:
    """The order our accounting is built on; tests/reference/scheduler.py runs this very
    function."""
    source = inspect.getsource(common.release_kv_cache)
    calls = ["tree_cache.insert_req(", "tree_cache.free_kv_row(", "tree_cache.unpin("]
    positions = [source.index(call) for call in calls]
    assert positions == sorted(positions)


def test_tree_node_takes_attributes_of_ours() -> None:
    """Chunk, chain and mark are attributes of SGLang's nodes."""
    node = TreeNode()
    node.chunkcache = "x"
    assert {
        "key",
        "value",
        "parent",
        "children",
        "lock_ref",
        "last_access_time",
        "priority",
    } <= set(vars(node))


def test_allocator_frees_segments() -> None:
    """Duplicates are freed by row segment."""
    assert parameters(TokenToKVPoolAllocator.free_segment) == ["free_index", "*", "start_pos"]
    assert TokenToKVPoolAllocator(4, torch.float32, "cpu", None, False).available_size() == 4


def test_outsider_can_subclass_eviction_strategy() -> None:
    """One abstract method, no constructor."""

    class Oldest(EvictionStrategy):  # type: ignore[misc]
        def get_priority(self, node: TreeNode) -> int:
            return int(node.id)

    node = TreeNode()
    assert Oldest().get_priority(node) == node.id
    assert parameters(EvictionStrategy.get_priority) == ["node"]


def test_outsider_can_subclass_radix_cache() -> None:
    """The base builds without pools, calls our `reset` while it is made,
    and takes another strategy."""

    class Counting(RadixCache):  # type: ignore[misc]
        num_resets = 0

        def reset(self) -> None:
            super().reset()
            self.num_resets += 1

    cache = Counting(CacheInitParams(False, None, None, 1))
    assert cache.num_resets == 1
    assert isinstance(cache.eviction_strategy, EvictionStrategy)
    assert cache.root_node.parent is None


def test_registry_takes_a_factory_once() -> None:
    """By name; a second registration of the name is an error."""
    name = "contract_test"
    registry.register_radix_cache_backend(name, lambda ctx: ctx)
    try:
        assert registry.get_radix_cache_factory(name) is not None
        with pytest.raises(ValueError):
            registry.register_radix_cache_backend(name, lambda ctx: ctx)
    finally:
        registry._RADIX_CACHE_REGISTRY.pop(name)


# Hooks and plugins


def test_hook_registry_tells_what_it_patched() -> None:
    """`_patched` is the only sign that a hook is really in."""
    assert isinstance(HookRegistry._patched, set)
    assert parameters(HookRegistry.register)[:3] == ["target", "hook", "hook_type"]
    assert {"AFTER", "AROUND"} <= set(HookType.__members__)


def test_internal_state_hook_target() -> None:
    """What our hook is given and what it writes into."""
    assert parameters(Scheduler.get_internal_state) == ["recv_req"]
    names = getattr(GetInternalStateReqOutput, "__struct_fields__", None) or [
        f.name for f in dataclasses.fields(GetInternalStateReqOutput)
    ]
    assert "internal_state" in names


def test_hook_targets_exist() -> None:
    """By the very strings we register."""
    from sglang_chunkcache import hooks

    for target in (hooks.GET_INTERNAL_STATE, hooks.FORWARD):
        module, cls, method = target.rsplit(".", 2)
        assert callable(getattr(getattr(importlib.import_module(module), cls), method))


def test_load_plugins_takes_nothing() -> None:
    """The launcher calls it before SGLang's own flags are parsed."""
    from sglang.srt.plugins import load_plugins

    assert parameters(load_plugins) == []


def test_outsider_can_subclass_the_cpu_platform() -> None:
    """As our platform does."""

    class Mine(CpuSRTPlatform):  # type: ignore[misc]
        _enum = PlatformEnum.OOT

    for name in ("get_default_attention_backend", "get_mha_kv_pool_cls", "get_paged_allocator_cls"):
        assert parameters(getattr(Mine, name)) == []


# HTTP


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("__init__", ["tokenizer_manager", "template_manager"]),
        ("handle_request", ["request", "raw_request"]),
        ("extract_routed_dp_rank_from_header", ["raw_request", "body_routed_dp_rank"]),
        ("_handle_non_streaming_request", ["adapted_request", "request", "raw_request"]),
        ("_generate_chat_stream", ["adapted_request", "request", "raw_request"]),
    ],
)
def test_serving_chat_method(name: str, expected: list[str]) -> None:
    """What we override or call; further parameters must be optional."""
    assert parameters(getattr(OpenAIServingChat, name))[: len(expected)] == expected


def test_serving_chat_streams_through_what_we_override() -> None:
    """The stream passes `_generate_chat_stream`, whose first output is waited for before HTTP
    200."""
    source = inspect.getsource(OpenAIServingChat._handle_streaming_request)
    assert "self._generate_chat_stream(" in source
    assert "__anext__()" in source
    assert "[DONE]" in inspect.getsource(OpenAIServingChat._generate_chat_stream)


def test_serving_base_turns_errors_into_answers() -> None:
    """`handle_request` raises nothing for bad input, so the endpoint may look at the status."""
    source = inspect.getsource(OpenAIServingBase.handle_request)
    assert "except ValueError" in source
    assert "except Exception" in source


def test_outsider_can_subclass_serving_chat() -> None:
    """No abstract method is left."""

    class Mine(OpenAIServingChat):  # type: ignore[misc]
        pass

    assert not inspect.isabstract(Mine)


def test_chat_request_fields() -> None:
    """OpenAI's fields and SGLang's, as we set and read them."""
    fields = set(ChatCompletionRequest.model_fields)
    assert {
        "messages",
        "model",
        "tools",
        "tool_choice",
        "max_tokens",
        "max_completion_tokens",
        "input_ids",
        "custom_params",
        "routed_dp_rank",
        "cache_salt",
        "extra_key",
        "lora_path",
        "chat_template_kwargs",
        "continue_final_message",
        "stream",
    } <= fields


def test_http_server_names() -> None:
    """App, state and start."""
    assert {"execute_warmup_func", "launch_callback"} <= {*parameters(http_server.launch_server)}
    assert parameters(http_server._execute_server_warmup) == ["server_args"]
    assert {"Starting", "Up", "UnHealthy"} <= {*ServerStatus.__members__}
    assert isinstance(http_server.HEALTH_CHECK_TIMEOUT, int)
    assert parameters(http_server.get_global_state) == []
    assert callable(http_server.app.include_router)
    assert parameters(http_server.available_models) == []
    assert parameters(http_server.retrieve_model) == ["model"]


def test_tokenizer_manager_methods() -> None:
    """What the endpoints call."""
    assert parameters(TokenizerManager.generate_request) == ["obj", "request"]
    assert parameters(TokenizerManager.create_abort_task) == ["obj"]
    assert parameters(TokenizerManager.abort_request) == ["rid", "abort_all"]
    assert isinstance(TokenizerManager.gracefully_exit, property)
    assert parameters(TokenizerManager.auto_create_handle_loop) == []
    assert "self.rid_to_state:" in inspect.getsource(TokenizerManager)
    assert inspect.isasyncgenfunction(TokenizerManager.generate_request)
    assert inspect.iscoroutinefunction(TokenizerManager.get_internal_state)
    assert "self.incremental_streaming_output =" in inspect.getsource(TokenizerManager)


def test_sigterm_is_ours_from_the_start_on() -> None:
    """SGLang sets its handler once, when its loop is created, and that handler does nothing but
    tell the manager: front/drain.py creates the loop and then does so itself. The other processes
    have no handler, so ignoring the signal takes none away."""
    source = " ".join(inspect.getsource(TokenizerManager.auto_create_handle_loop).split())
    assert source.index("if self.event_loop is not None: return") < source.index(
        "loop.add_signal_handler(signal.SIGTERM"
    )
    assert inspect.getsource(tokenizer_manager).count("SIGTERM,") == 1
    handler = inspect.getsource(tokenizer_manager.SignalHandler.sigterm_handler)
    assert (
        handler.strip().splitlines()[-1].strip() == "self.tokenizer_manager.gracefully_exit = True"
    )
    for module in (scheduler, detokenizer_manager, data_parallel_controller):
        assert "SIGTERM" not in inspect.getsource(module), module


def test_ready_is_open_and_asks_nobody() -> None:
    """Probes have no key. `--stock` answers it, too, by what ours looks at."""
    decided = decide_request_auth(
        method="GET",
        path="/ready",
        authorization_header=None,
        api_key="k",
        admin_api_key="a",
        auth_level=AuthLevel.NORMAL,
    )
    assert decided.allowed
    assert {route.path for route in http_server.app.routes if hasattr(route, "path")} >= {
        READY,
        *HEALTH,
    }
    source = inspect.getsource(TokenizerManager.is_ready)
    assert all(
        name in source
        for name in ("is_pause", "gracefully_exit", "server_status == ServerStatus.Up")
    )


def test_meta_info_keys() -> None:
    """What the service reads from an output."""
    source = inspect.getsource(TokenizerManager)
    logprobs = (
        "output_top_logprobs",
        "input_top_logprobs",
        "output_token_logprobs",
        "input_token_logprobs",
    )
    for key in (
        "finish_reason",
        "completion_tokens",
        "cached_tokens",
        "dp_rank",
        *logprobs,
        "output_token_logprobs_length",
    ):
        assert f'"{key}"' in source, key


def test_auth_levels() -> None:
    """The tree shows other tenants' chunks."""
    assert auth_level(AuthLevel.ADMIN_OPTIONAL)(lambda: 1)() == 1


def test_kill_process_tree_parameters() -> None:
    """Children only."""
    assert parameters(kill_process_tree)[:2] == ["parent_pid", "include_parent"]


def test_add_stats_writes_into_the_internal_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our hook against an object of SGLang's shape.
    Another cache has no stats and is left alone."""
    from sglang_chunkcache import hooks
    from sglang_chunkcache.wire.message import decode
    from sglang_chunkcache.wire.state import STATE_KEY, RankState
    from tests.reference.scheduler import Scheduler, config

    result = SimpleNamespace(internal_state={})
    assert hooks._add_stats(result, SimpleNamespace(tree_cache=SimpleNamespace())) is result
    assert result.internal_state == {}
    monkeypatch.setattr(hooks, "get_parallel", lambda: SimpleNamespace(dp_rank=1))
    cache = Scheduler(8, config()).cache
    scheduler = SimpleNamespace(tree_cache=cache, waiting_queue=["a", "b"], chunked_req="c")
    hooks._add_stats(result, scheduler)
    assert decode(result.internal_state[STATE_KEY], RankState) == cache.rank_state(1, num_waiting=3)
