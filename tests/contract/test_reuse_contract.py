"""What any-position reuse relies on in SGLang:
the promise of a host hit, the forward hook, the pool, the model's insides."""

from __future__ import annotations

import importlib.util
import re
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers import radix_attention
from sglang.srt.managers.io_struct import GetInternalStateReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    EvictParams,
    InitLoadBackParams,
    MatchResult,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext
from sglang.srt.sampling.sampling_params import SamplingParams

from radix_ext import FusionRequest
from sglang_chunkcache import hooks
from tests.kit import releases
from tests.kit.contract import fields, has_in_order, other_signatures, source
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import FakeReq, config, marked, packed

pytestmark = pytest.mark.matrix


def test_only_an_admission_limits_the_key() -> None:
    """By that a match that orders the queue is told from the one that is promised more."""
    scheduler = FusedScheduler(60, config(reuse="fused"))
    scheduler.serve(FakeReq([9, 1, 2, 3, 4, 5, 6], marked([(1, 4), (4, 6)])))
    ids, fusion = [9, 4, 5, 1, 2, 3, 6], FusionRequest("none", 0.0, "r")
    params = SamplingParams(custom_params=packed(marked([(1, 3), (3, 6)], fusion=fusion), ids))
    req = Req("rid", "", array("q", ids), params)

    def found() -> tuple[int, int]:
        return releases.found(req), req.host_hit_length

    for policy in ("lpm", "dfs-weight", "hrrn"):
        SchedulePolicy(policy, scheduler.cache, False, False, False).calc_priority([req])
        assert found() == (1, 0)
    req.init_next_round_input(scheduler.cache)
    assert found() == (1, 5)
    releases.match_in_queue(scheduler.cache, req)
    assert found() == (1, 0)


LOADED = releases.since_checkpoint("req.host_loaded_length", "new_indices")
OWNED = releases.since_checkpoint("load_back_is_cache_owned(): ", "")


def test_promise_is_kept_in_full_or_not_at_all() -> None:
    """None puts the request off, empty is computed, anything between kills the scheduler."""
    assert has_in_order(
        PrefillAdder.add_one_req,
        "with self._lock_node(req.last_node)",
        "self.tree_cache.init_load_back(",
        "if loaded is None: return AddReqResult.OTHER",
        f"{LOADED}, req.last_node = loaded",
        "if 0 < req.host_loaded_length < promised_host_hit: raise RuntimeError(",
        f"{OWNED}req.kv.cache_protected_len = ",
    )


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (InitLoadBackParams, "best_match_node host_hit_length req"),
        (MatchResult, "host_hit_length best_match_node last_host_node last_device_node"),
        (ScheduleBatch, "reqs tree_cache forward_mode"),
        (
            ForwardBatch,
            "forward_mode batch_size input_ids positions out_cache_loc req_pool_indices seq_lens"
            " extend_seq_lens extend_prefix_lens",
        ),
        (ForwardContext, "attn_backend"),
        (EvictParams, "num_tokens"),
        (SchedulerWeightUpdaterManager, "scheduler"),
        # the one free field of the state request; /chunkcache/explain travels in it
        (GetInternalStateReq, "rid"),
    ],
)
def test_class_has_fields(cls: type, expected: str) -> None:
    """Fields that we read or set by name."""
    assert set(expected.split()) <= fields(cls)


POOL = """
set_kv_buffer(layer, loc_info, cache_k, cache_v, ...) get_key_buffer(layer_id)
register_layer_transfer_counter(layer_transfer_counter)
"""
FACTORY = "create_backend(backend_name, storage_config, mem_pool_host, kwargs)"


@pytest.mark.parametrize(
    ("owner", "signatures"),
    [
        (BasePrefixCache, "init_load_back(params)"),
        (TpModelWorker, "forward_batch_generation(batch, ...)"),
        (MHATokenToKVPool, POOL),
        (ReqToTokenPool, "alloc_rows(need_size)"),
        (cuda_graph_config, "check_cuda_graph_backend(phase, backend)"),
        (HiCacheFile, "get(key, target_location, ...)"),
        (HiCacheStorage, "get(key, target_location, ...)"),
        (StorageBackendFactory, FACTORY),
        (Scheduler, "_add_request_to_queue(req, ...)"),
    ],
    ids=str,
)
def test_methods_take(owner: Any, signatures: str) -> None:
    """What we override or call."""
    assert other_signatures(owner, signatures) == {}


@pytest.mark.parametrize(
    ("function", "pieces"),
    [
        # a load-back is asked for per request, not per --enable-hierarchical-cache
        (Req.needs_host_load_back, ["self.host_hit_length > 0"]),
        # plans are stored on the request, and a request between two prefill pieces is not matched
        # again, or its plan would be lost
        (
            Req.init_next_round_input,
            [
                "if tree_cache is not None:",
                releases.since_checkpoint("match_kv_cache( self,", "req=self,"),
            ],
        ),
        (Scheduler._get_new_batch_prefill_raw, ["self.chunked_req.init_next_round_input()"]),
        # the hook around it sees the batch before it is laid out
        (TpModelWorker.forward_batch_generation, ["ForwardBatch.init_new("]),
        (ReqToTokenPool.__init__, ["self.free_slots"]),
        # slots that an admission has made are read on the forward stream
        (Scheduler.run_batch, ["self.forward_stream.wait_stream(self.schedule_stream)"]),
        (
            TokenizerControlMixin.get_internal_state,
            ["self.get_internal_state_communicator(req)"],
        ),
        # a flush resets the tree, also after a weight update, in 0.5.21 before its version is
        # recorded: so chunk KV of old weights goes by a fingerprint
        (Scheduler.flush_cache, ["self.tree_cache.reset()"]),
        (
            SchedulerWeightUpdaterManager.flush_cache_after_weight_update,
            ["self.flush_cache("],
        ),
        (
            SchedulerWeightUpdaterManager.update_weights_from_disk,
            ["self.flush_cache_after_weight_update("],
        ),
        # what a round is told by, and that who is put off ends none
        (
            PrefillAdder.__init__,
            [
                "self.running_batch = running_batch",
                "self.rem_chunk_tokens = rem_chunk_tokens",
                "self.memory_budget = ",
                "self.can_run_list = []",
                "self.preempt_list = []",
            ],
        ),
        (PrefillBudget.reserve, ["self.current_offset += "]),
        (
            Scheduler._get_new_batch_prefill_raw,
            [
                "for req in self.waiting_queue:",
                "req.init_next_round_input(self.tree_cache)",
                "res = adder.add_one_req(",
                "if res != AddReqResult.CONTINUE:",
            ],
        ),
        # who leaves the queue unserved is told to the cache
        (
            Scheduler.abort_request,
            ["self.waiting_queue.pop(i)", "self._release_aborted_request(req)"],
        ),
        (Scheduler._release_aborted_request, ["self.tree_cache.finish(req.cache_request_handle, "]),
        (BasePrefixCache.finish, ["self.release_aborted_request(handle)"]),
        # every request passes it on its way into the queue
        (Scheduler._add_request_to_queue, ["self.waiting_queue.append(req)"]),
        # the end of a scheduler is told to the cache: what waits for the storage is written then
        (Scheduler.release_host_resources, ["self.tree_cache.release_host_resources()"]),
        (
            run_scheduler_process,
            ["if scheduler.gracefully_exit: scheduler.release_host_resources()"],
        ),
        # HiCache's storage is made and used without HiCache; `file` is in a folder that only the
        # environment names, overwrites nothing, and puts entries where we delete them
        (
            StorageBackendFactory._create_builtin_backend,
            ['if backend_name in ("file", "sim"): return backend_class(storage_config)'],
        ),
        (
            StorageBackendFactory._create_dynamic_backend,
            ["return backend_class(storage_config, kwargs)"],
        ),
        (HiCacheFile.__init__, ["envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()"]),
        (
            HiCacheFile.set,
            [
                "self._get_suffixed_key(key)",
                'os.path.join(self.file_path, f"{suffixed}.bin")',
                "if self.exists(key):",
                'f".{uuid.uuid4().hex}.tmp"',
                "os.replace(tmp_path, tensor_path)",
            ],
        ),
    ],
)
def test_function_does(function: Any, pieces: list[str]) -> None:
    """What our code relies on, in this order."""
    assert has_in_order(function, *pieces)


def test_getters_wait_for_their_layer() -> None:
    """Through the counter; by nothing else does attention read the cache."""
    pool = MHATokenToKVPool(7, 1, torch.float32, 1, 8, 3, "cpu", False)
    asked: list[int] = []
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=asked.append))
    assert pool.get_key_buffer(1).data_ptr() == pool.k_buffer[1].data_ptr()
    pool.get_value_buffer(0)
    pool.get_kv_buffer(2)
    assert asked == [1, 0, 2, 2]
    pool.register_layer_transfer_counter(None)
    pool.get_kv_buffer(2)
    for name in ("torch_native", "flashinfer", "flashattention", "triton"):
        backend = importlib.util.find_spec(f"sglang.srt.layers.attention.{name}_backend")
        assert backend is not None
        text = Path(str(backend.origin)).read_text(encoding="utf-8")
        assert not re.search(r"pool\.[kv]_buffer", text)
    attention = source(radix_attention).replace(" ", "")
    eager = "breakable_unified_attention_with_output=eager_on_graph(True)("
    assert eager in attention or "@eager_on_graphdef_eager_attention(" in attention


def test_graphs_of_whole_prefills_can_be_told() -> None:
    """In them attention asks for no layer. Without a server there are none."""
    assert (Phase.PREFILL, Backend.FULL) == ("prefill", "full")
    assert not check_cuda_graph_backend(Phase.PREFILL, Backend.FULL)


SHARDED = {"dcp_size", "dcp_rank", "logical_page_size"}
"""Of later releases, with defaults: MLA alone has more than one."""


def test_storage_config_needs_what_we_give() -> None:
    optional = {"tp_lcm_size", "should_split_heads", "dp_rank", "extra_config"}
    required = "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size is_mla_model"
    required += " enable_storage_metrics is_page_first_layout model_name"
    assert fields(HiCacheStorageConfig) - optional - SHARDED == set(required.split())


def test_updates_of_weights_are_all_known() -> None:
    """These are all that change weights."""
    names = vars(SchedulerWeightUpdaterManager)
    every = {name for name in names if re.search("weight.*update|update.*weight", name)}
    others = "flush_cache_after_weight_update record_weight_version_after_update end_weight_update"
    others += " init_weights_update_group destroy_weights_update_group"
    changing = {target.rpartition(".")[2] for target in hooks.UPDATES}
    assert every == changing | set(others.split())
