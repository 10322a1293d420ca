"""Every name and signature of SGLang that we touch. Red here after an upgrade says what to look at;
nothing else need fail.

The bases that we subclass are also subclassed here by an outsider, so that a new abstract method
shows.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

pytest.importorskip("sglang")

import sglang
from sglang.srt import plugins
from sglang.srt.arg_groups import overrides
from sglang.srt.configs.model_config import ModelConfig
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
from sglang.srt.mem_cache import allocation, common, kv_cache_builder, registry
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
from sglang.srt.observability.trace import TraceReqContext
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.auth import (
    AuthLevel,
    add_api_key_middleware,
    auth_level,
    decide_request_auth,
)

import sglang_chunkcache
from sglang_chunkcache import hooks
from sglang_chunkcache.front.drain import HEALTH, READY
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.wire.message import decode
from sglang_chunkcache.wire.state import STATE_KEY, RankState
from tests.kit import releases
from tests.kit.contract import fields, has_in_order, other_signatures, parameters, source
from tests.reference.scheduler import Scheduler as OurScheduler
from tests.reference.scheduler import config

pytestmark = pytest.mark.matrix

PACKAGE = Path(sglang_chunkcache.__file__).parent
BETWEEN = re.compile(r"\"sglang>=([0-9.]+),<([0-9.]+)\"")


def test_version() -> None:
    """One of those in pyproject.toml; what is asserted below was read in these releases."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    found = BETWEEN.search(text)
    assert found is not None
    assert Version(found[1]) <= Version(sglang.__version__) < Version(found[2])


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
    """Also those inside functions, which nothing else would notice before a server starts."""
    container = importlib.import_module(module)
    assert hasattr(container, name) or importlib.import_module(f"{module}.{name}")


RADIX_CACHE = """
match_prefix(params) insert(params) reset() evict(params) inc_lock_ref(node)
dec_lock_ref(node, params) evictable_size() protected_size() _delete_leaf(node)
_split_node(key, child, split_len) _match_prefix_helper(node, key)
""" + releases.since_checkpoint(
    """
checkpoint(req, *, up_to) lock(node) unlock(lock) path_device_indices(node)
prefix_device_indices(req) _insert_cache(req, token_ids, *, key_limit, split_prompt)
_insert_helper(node, key, value, priority, inserted_len)
""",
    """
cache_unfinished_req(req, chunked) insert_req(req, *, up_to)
_insert_cache(req, token_ids, *, chunked, key_limit, split_prompt)
_insert_helper(node, key, value, priority, chunked)
""",
)
SERVING_CHAT = """
__init__(tokenizer_manager, template_manager, ...) handle_request(request, raw_request, ...)
extract_routed_dp_rank_from_header(raw_request, body_routed_dp_rank, ...)
_handle_non_streaming_request(adapted_request, request, raw_request, ...)
_generate_chat_stream(adapted_request, request, raw_request, ...)
"""
HTTP_SERVER = """
_execute_server_warmup(server_args) get_global_state() available_models() retrieve_model(model)
kill_process_tree(parent_pid, include_parent, ...)
"""
TOKENIZER_MANAGER = """
generate_request(obj, request) create_abort_task(obj) abort_request(rid, abort_all)
auto_create_handle_loop()
"""
TRACE_CONTEXT = """
__init__(rid, bootstrap_room, role, module_name, external_trace_header, ...)
trace_req_start(ts) trace_slice(slice, ...) trace_req_finish(ts, attrs)
"""
PAGED_ALLOCATOR = """
alloc_extend(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens,
num_new_pages) alloc_decode(seq_lens, seq_lens_cpu, last_loc) merge_and_sort_free()
"""
PLATFORM = "get_default_attention_backend() get_paged_allocator_cls() "
PLATFORM += releases.since_checkpoint("get_kv_pool_cls(*, kind)", "get_mha_kv_pool_cls()")


@pytest.mark.parametrize(
    ("owner", "signatures"),
    [
        (RadixCache, RADIX_CACHE),
        (RadixKey, "match(other, page_size) child_key(page_size) _check_compatible(other)"),
        (TokenToKVPoolAllocator, "free_segment(free_index, *, start_pos)"),
        (PagedTokenToKVPoolAllocator, PAGED_ALLOCATOR),
        (UnifiedRadixCache, "match_prefix(params)"),
        (ServerArgs, "resolve_once()"),
        (ModelConfig, "from_server_args(server_args, ...)"),
        (kv_cache_builder, "uses_ssm_state(model_config)"),
        (overrides, "resolving_view(...)"),
        (EvictionStrategy, "get_priority(node)"),
        (HookRegistry, "register(target, hook, hook_type, ...)"),
        (plugins, "load_plugins()"),
        (Scheduler, "get_internal_state(recv_req)"),
        (CpuSRTPlatform, PLATFORM),
        (OpenAIServingChat, SERVING_CHAT),
        (http_server, HTTP_SERVER),
        (TokenizerManager, TOKENIZER_MANAGER),
        (TraceReqContext, TRACE_CONTEXT),
        (SchedulerReqTimeStats, "trace_slice(stage, start_time, end_time, attrs)"),
    ],
    ids=str,
)
def test_methods_take(owner: Any, signatures: str) -> None:
    """What we override or call."""
    assert other_signatures(owner, signatures) == {}


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (MatchPrefixParams, "key req"),
        (MatchResult, "last_device_node last_host_node best_match_node host_hit_length"),
        (MatchResult, releases.since_checkpoint("device_prefix_len", "device_indices")),
        (InsertParams, "key value priority"),
        (InsertParams, releases.since_checkpoint("inserted_len", "chunked")),
        (InsertResult, "prefix_len last_device_node"),
        (
            CacheInitParams,
            "disable req_to_token_pool token_to_kv_pool_allocator page_size is_eagle",
        ),
        (ReqKvInfo, "req_pool_idx cache_protected_len kv_committed_len kv_allocated_len"),
        (registry.TreeCacheBuildContext, "params server_args tp_worker tp_rank"),
        (
            GenerateReqInput,
            "input_ids sampling_params stream return_logprob logprob_start_len top_logprobs_num"
            " extra_key cache_salt routed_dp_rank return_text_in_logprobs custom_logit_processor"
            " log_metrics rid external_trace_header",
        ),
        (LoadSnapshot, "num_waiting_reqs"),
        (GetInternalStateReqOutput, "internal_state"),
        (
            ServerArgs,
            "dp_size device page_size tokenizer_worker_num disable_radix_cache"
            " speculative_algorithm enable_hierarchical_cache disaggregation_mode"
            " skip_tokenizer_init enable_metrics api_key admin_api_key enable_memory_saver"
            " radix_cache_backend kv_events_config enable_lmcache enable_flexkv"
            " enable_unified_cache_external_linker enable_session_radix_cache",
        ),
        (
            ChatCompletionRequest,
            "messages model tools tool_choice max_tokens max_completion_tokens input_ids"
            " custom_params routed_dp_rank cache_salt extra_key lora_path chat_template_kwargs"
            " continue_final_message stream",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_class_has_fields(cls: Any, expected: str) -> None:
    """Fields that we read or set by name."""
    assert set(expected.split()) <= fields(cls)


# The cache


def test_req_sets_attributes() -> None:
    """Read or written by us. `Req` has no `__slots__`, so we may set attributes of our own."""
    text, names = source(Req), "sampling_params origin_input_ids output_ids extra_key cache_salt"
    names += " customized_info priority last_node kv "
    names += releases.since_checkpoint("prefix_len extend_end lock", "prefix_indices")
    for name in names.split():
        assert f"self.{name}" in text, name
    assert not hasattr(Req, "__slots__")
    assert SamplingParams(custom_params="any JSON").custom_params == "any JSON"


def test_radix_key_parts() -> None:
    """`limit` caps without slicing. An empty salt is none. A key is one array and a namespace."""
    key = RadixKey(array("q", [1, 2, 3]), "x", limit=2, cache_salt="")
    assert (len(key), key.extra_key, key.cache_salt, key.is_bigram) == (2, "x", None, False)
    assert key.page_aligned(1) is key


def test_radix_cache_uses_the_key_only_by_methods_we_override() -> None:
    """`child_key_at` and `match_at` would go past a chunk."""
    assert "child_key_at(" not in source(RadixCache)
    assert "match_at(" not in source(RadixCache)


def test_checkpoint_matches_the_key_that_was_inserted() -> None:
    """It matches again by the very key that `_insert_cache` gave back; and trusts its length."""
    name = releases.since_checkpoint("checkpoint", "cache_unfinished_req")
    again = "self.match_prefix(MatchPrefixParams(key=radix_key))"
    assert has_in_order(getattr(RadixCache, name), "self._insert_cache(", again)
    if not releases.HAS_CHECKPOINT:
        assert "req.kv.cache_protected_len = len(radix_key)" in source(RadixCache.insert_req)


def test_request_without_a_tree_keeps_its_slots() -> None:
    """As audits do in our tree: the next piece of a prompt begins where the last one ended,
    whatever the tree has taken."""
    if releases.HAS_CHECKPOINT:
        told = "tree_cache.checkpoint(req, up_to=req.extend_end)"
        assert has_in_order(common.checkpoint_kv_cache, told, "req.prefix_len = req.extend_end")
        text = source(allocation)
        assert "if req.kv.holds_kv: row = " in text
        assert "return row[: req.prefix_len]" in text
        return
    plain = importlib.import_module("sglang.srt.mem_cache.chunk_cache").ChunkCache
    kept = "req.prefix_indices = kv_indices.to(dtype=torch.int64, copy=True)"
    assert kept in source(plain.cache_unfinished_req)
    assert source(plain.insert_req).strip().endswith("pass")


def test_waiting_requests_are_told() -> None:
    """Those that the rank's own answer counts, and the load report that is asked first."""
    for cls, names in (
        (Scheduler, ("self.waiting_queue", "self.chunked_req")),
        (Scheduler, ("self.disable_radix_cache =", "self.page_size =", "self.spec_algorithm =")),
        (Scheduler, ("self.max_total_num_tokens,",)),
        (TokenizerManager, ("self.load_snapshot_reader =", "self.preferred_sampling_params =")),
    ):
        text = source(cls)
        assert all(name in text for name in names)


def test_logprobs_limit_the_match() -> None:
    """So an audit may use the exact KV of the prompt's last token but one."""
    limit = "min(max_prefix_len, self.logprob_start_len)"
    assert limit in source(Req._compute_max_prefix_len)


def test_release_inserts_then_frees_then_unlocks() -> None:
    """The order our accounting is built on; tests/reference/scheduler.py runs this function."""
    calls = releases.since_checkpoint(
        ("checkpoint(", "free_kv_row(", "unlock("), ("insert_req(", "free_kv_row(", "unpin(")
    )
    assert has_in_order(common.release_kv_cache, *(f"tree_cache.{call}" for call in calls))


def test_tree_node_takes_attributes_of_ours() -> None:
    """Chunk, chain and mark are attributes of SGLang's nodes."""
    node = TreeNode()
    node.chunkcache = "x"
    names = "key value parent children lock_ref last_access_time priority"
    assert set(names.split()) <= set(vars(node))


def test_outsider_can_subclass_the_bases() -> None:
    """RadixCache builds without pools and calls our `reset` meanwhile."""

    class Counting(RadixCache):  # type: ignore[misc]
        num_resets = 0

        def reset(self) -> None:
            super().reset()
            self.num_resets += 1

    class Oldest(EvictionStrategy):  # type: ignore[misc]
        def get_priority(self, node: TreeNode) -> int:
            return int(node.id)

    class Mine(CpuSRTPlatform):  # type: ignore[misc]
        _enum = PlatformEnum.OOT

    cache, node = Counting(CacheInitParams(False, None, None, 1)), TreeNode()
    assert cache.num_resets == 1
    assert isinstance(cache.eviction_strategy, EvictionStrategy)
    assert cache.root_node.parent is None
    assert Oldest().get_priority(node) == node.id
    assert not inspect.isabstract(OpenAIServingChat)


# Hooks and plugins


def test_hook_registry_tells_what_it_patched() -> None:
    """`_patched` is the only sign that a hook is really in."""
    assert isinstance(HookRegistry._patched, set)
    assert {"AFTER", "AROUND"} <= set(HookType.__members__)


def test_hook_targets_exist() -> None:
    """By the very strings we register."""
    for target in (hooks.GET_INTERNAL_STATE, hooks.FORWARD, hooks.LOAD_MODEL):
        module, cls, method = target.rsplit(".", 2)
        assert callable(getattr(getattr(importlib.import_module(module), cls), method))


# HTTP


def test_serving_chat_streams_through_what_we_override() -> None:
    """The first output is waited for before HTTP 200; bad input raises nothing."""
    streaming = source(OpenAIServingChat._handle_streaming_request)
    assert "self._generate_chat_stream(" in streaming
    assert "__anext__()" in streaming
    assert "[DONE]" in source(OpenAIServingChat._generate_chat_stream)
    handling = source(OpenAIServingBase.handle_request)
    assert "except ValueError" in handling
    assert "except Exception" in handling


def test_http_server_names() -> None:
    """App, state and start."""
    assert {"execute_warmup_func", "launch_callback"} <= {*parameters(http_server.launch_server)}
    assert {"Starting", "Up", "UnHealthy"} <= {*ServerStatus.__members__}
    assert isinstance(http_server.HEALTH_CHECK_TIMEOUT, int)
    assert callable(http_server.app.include_router)


def test_tokenizer_manager_names() -> None:
    """What the endpoints call and read."""
    assert isinstance(TokenizerManager.gracefully_exit, property)
    assert inspect.isasyncgenfunction(TokenizerManager.generate_request)
    assert inspect.iscoroutinefunction(TokenizerManager.get_internal_state)
    text = source(TokenizerManager)
    assert "self.rid_to_state:" in text
    assert "self.incremental_streaming_output =" in text
    keys = "finish_reason completion_tokens cached_tokens dp_rank output_top_logprobs"
    keys += " input_top_logprobs output_token_logprobs input_token_logprobs"
    for key in [*keys.split(), "output_token_logprobs_length"]:
        assert f'"{key}"' in text, key


def test_sigterm_is_ours_from_the_start_on() -> None:
    """SGLang sets its handler once, when its loop is created, and that handler does nothing but
    tell the manager: front/drain.py creates the loop and then does so itself. The other processes
    have no handler, so ignoring the signal takes none away."""
    assert has_in_order(
        TokenizerManager.auto_create_handle_loop,
        "if self.event_loop is not None: return",
        "loop.add_signal_handler(signal.SIGTERM",
    )
    assert source(tokenizer_manager).count("SIGTERM,") == 1
    handler = source(tokenizer_manager.SignalHandler.sigterm_handler)
    assert handler.strip().endswith("self.tokenizer_manager.gracefully_exit = True")
    for module in (scheduler, detokenizer_manager, data_parallel_controller):
        assert "SIGTERM" not in source(module), module


def test_keys_are_decided_by_one_function_of_named_arguments() -> None:
    """Ours is around it (front/page/access.py)."""
    text = source(add_api_key_middleware)
    for each in ("= decide_request_auth(", "path=path,", "api_key=self.api_key,"):
        assert each in text
    assert "decision.error_status_code" in text


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
    routes = {route.path for route in http_server.app.routes if hasattr(route, "path")}
    assert routes >= {READY, *HEALTH}
    text = source(TokenizerManager.is_ready)
    if "self.is_healthy()" in text:
        text += source(TokenizerManager.is_healthy)
    for name in ("is_pause", "gracefully_exit", "server_status == ServerStatus.Up"):
        assert name in text
    assert auth_level(AuthLevel.ADMIN_OPTIONAL)(lambda: 1)() == 1


def test_add_stats_writes_into_the_internal_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cache has no stats and is left alone."""
    result = SimpleNamespace(internal_state={})
    assert hooks._add_stats(result, SimpleNamespace(tree_cache=SimpleNamespace())) is result
    assert result.internal_state == {}
    monkeypatch.setattr(hooks, "get_parallel", lambda: SimpleNamespace(dp_rank=1))
    cache = OurScheduler(8, config()).cache
    asked = SimpleNamespace(tree_cache=cache, waiting_queue=["a", "b"], chunked_req="c")
    hooks._add_stats(result, asked)
    told = decode(result.internal_state[STATE_KEY], RankState)
    assert told == rank_state(cache, 1, num_waiting=3)
