"""What any-position reuse relies on in SGLang:
the promise of a host hit, the forward hook, the pool, the model's insides."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers import radix_attention
from sglang.srt.managers.io_struct import GetInternalStateReq
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy, match_prefix_for_req
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
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext
from sglang.srt.sampling.sampling_params import SamplingParams

from radix_ext import FusionRequest
from sglang_chunkcache import hooks
from tests.contract.test_sglang_contract import parameters
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import FakeReq, config, marked, packed


def source(function: object) -> str:
    """The code with all white space as single blanks."""
    return re.sub(r"\s+", " ", inspect.getsource(function))  # type: ignore[arg-type]


def test_only_an_admission_limits_the_key() -> None:
    """By that a match that orders the queue is told from the one that is promised more:
    SGLang's functions on a fused request."""
    scheduler = FusedScheduler(60, config(reuse="fused"))
    scheduler.serve(FakeReq([9, 1, 2, 3, 4, 5, 6], marked([(1, 4), (4, 6)])))
    ids, fusion = [9, 4, 5, 1, 2, 3, 6], FusionRequest("none", 0.0, "r")
    params = SamplingParams(custom_params=packed(marked([(1, 3), (3, 6)], fusion=fusion), ids))
    req = Req("rid", "", array("q", ids), params)

    def found() -> tuple[int, int]:
        return len(req.prefix_indices), req.host_hit_length

    for policy in ("lpm", "dfs-weight", "hrrn"):
        SchedulePolicy(policy, scheduler.cache, False, False, False).calc_priority([req])
        assert found() == (1, 0)
    req.init_next_round_input(scheduler.cache)
    assert found() == (1, 5)
    match_prefix_for_req(scheduler.cache, req, include_req=True)
    assert found() == (1, 0)


def test_promise_is_kept_in_full_or_not_at_all() -> None:
    """None would end admission for all, empty is computed, anything between kills the scheduler;
    what is loaded belongs to the tree at once."""
    admission = source(PrefillAdder.add_one_req)
    assert "if loaded is None: return AddReqResult.OTHER" in admission
    assert "new_indices, req.last_node = loaded" in admission
    assert "if 0 < req.host_loaded_length < promised_host_hit: raise RuntimeError(" in admission
    assert "req.kv.cache_protected_len = len(req.prefix_indices)" in admission
    assert {f.name for f in dataclasses.fields(InitLoadBackParams)} >= {
        "best_match_node",
        "host_hit_length",
        "req",
    }
    assert parameters(BasePrefixCache.init_load_back) == ["params"]


def test_prefix_is_held_while_slots_are_taken() -> None:
    """`init_load_back` may evict: the request's own prefix must not be among it."""
    admission = source(PrefillAdder.add_one_req)
    assert admission.index("with self._lock_node(req.last_node)") < admission.index(
        "self.tree_cache.init_load_back("
    )


def test_host_hits_need_no_flag() -> None:
    """A load-back is asked for per request, not per --enable-hierarchical-cache."""
    assert "self.host_hit_length > 0" in source(Req.needs_host_load_back)
    assert {"host_hit_length", "best_match_node", "last_host_node", "last_device_node"} <= set(
        MatchResult._fields
    )


def test_requests_are_matched_as_themselves() -> None:
    """Plans are stored on the request; a request between two prefill pieces is not matched again,
    or its plan would be lost."""
    assert "req=self," in source(Req.init_next_round_input)
    assert "if tree_cache is not None:" in source(Req.init_next_round_input)
    assert "self.chunked_req.init_next_round_input()" in source(
        Scheduler._get_new_batch_prefill_raw
    )


def test_forward_hook_sees_the_batch_before_it_is_laid_out() -> None:
    """The hook gets (worker, batch, ...); `ForwardBatch.init_new` is called inside, after it."""
    assert parameters(TpModelWorker.forward_batch_generation)[0] == "batch"
    assert "ForwardBatch.init_new(" in source(TpModelWorker.forward_batch_generation)
    names = {f.name for f in dataclasses.fields(ScheduleBatch)}
    assert {"reqs", "tree_cache", "forward_mode"} <= names


def test_forward_batch_fields() -> None:
    """What the passes set."""
    names = {f.name for f in dataclasses.fields(ForwardBatch)}
    assert {
        "forward_mode",
        "batch_size",
        "input_ids",
        "positions",
        "out_cache_loc",
        "req_pool_indices",
        "seq_lens",
        "extend_seq_lens",
        "extend_prefix_lens",
    } <= names
    assert {f.name for f in dataclasses.fields(ForwardContext)} == {"attn_backend"}


def test_pool_methods() -> None:
    """Slots are rows of per-layer buffers, and writing takes no layer object of ours."""
    assert parameters(MHATokenToKVPool.set_kv_buffer)[:4] == [
        "layer",
        "loc_info",
        "cache_k",
        "cache_v",
    ]
    assert parameters(MHATokenToKVPool.get_key_buffer) == ["layer_id"]
    assert parameters(ReqToTokenPool.alloc_rows) == ["need_size"]
    assert "self.free_slots" in source(ReqToTokenPool.__init__)
    assert {f.name for f in dataclasses.fields(EvictParams)} >= {"num_tokens"}


def test_getters_wait_for_their_layer() -> None:
    """Through the counter, before they give a layer away. By nothing else does attention read the
    cache, and in a graph of parts of a prefill it runs anew."""
    assert parameters(MHATokenToKVPool.register_layer_transfer_counter) == [
        "layer_transfer_counter"
    ]
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
        assert not re.search(
            r"pool\.[kv]_buffer", Path(str(backend.origin)).read_text(encoding="utf-8")
        )
    attention = re.sub(r"\s+", "", inspect.getsource(radix_attention))
    assert "breakable_unified_attention_with_output=eager_on_graph(True)(" in attention


def test_graphs_of_whole_prefills_can_be_told() -> None:
    """In them attention asks for no layer. Without a server there are none."""
    assert parameters(check_cuda_graph_backend) == ["phase", "backend"]
    assert (Phase.PREFILL, Backend.FULL) == ("prefill", "full")
    assert not check_cuda_graph_backend(Phase.PREFILL, Backend.FULL)


def test_forward_stream_waits_for_the_scheduler() -> None:
    """Slots that an admission has made are read on it."""
    assert "self.forward_stream.wait_stream(self.schedule_stream)" in source(Scheduler.run_batch)


def test_state_request_carries_a_name() -> None:
    """`rid` is the one free field of the state request; /chunkcache/explain travels in it."""
    assert "rid" in GetInternalStateReq.__struct_fields__
    assert GetInternalStateReq(rid="x").rid == "x"
    assert "self.get_internal_state_communicator(req)" in source(
        TokenizerControlMixin.get_internal_state
    )


def test_flush_resets_the_tree() -> None:
    """Also after a weight update, before its version is recorded:
    so chunk KV of old weights goes by a fingerprint."""
    assert "self.tree_cache.reset()" in source(Scheduler.flush_cache)
    assert "self.flush_cache(" in source(
        SchedulerWeightUpdaterManager.flush_cache_after_weight_update
    )
    update = source(SchedulerWeightUpdaterManager.update_weights_from_disk)
    assert update.index("self.flush_cache_after_weight_update(") < update.index(
        "record_weight_version_after_update("
    )


def test_storage_names() -> None:
    """HiCache's storage is made and used without HiCache. `file` is in a folder that only the
    environment names, overwrites nothing, and puts entries where we delete them."""
    create = source(StorageBackendFactory._create_builtin_backend)
    assert 'if backend_name in ("file", "sim"): return backend_class(storage_config)' in create
    assert "return backend_class(storage_config, kwargs)" in source(
        StorageBackendFactory._create_dynamic_backend
    )
    assert parameters(StorageBackendFactory.create_backend) == [
        "backend_name",
        "storage_config",
        "mem_pool_host",
        "kwargs",
    ]
    assert "envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get()" in source(HiCacheFile.__init__)
    assert (
        parameters(HiCacheFile.get)[:2]
        == parameters(HiCacheStorage.get)[:2]
        == ["key", "target_location"]
    )
    written = source(HiCacheFile.set)
    assert "if self.exists(key):" in written
    assert 'os.path.join(self.file_path, f"{suffixed}.bin")' in written
    assert 'f".{uuid.uuid4().hex}.tmp"' in written
    assert "os.replace(tmp_path, tensor_path)" in written
    assert "self._get_suffixed_key(key)" in written
    optional = {"tp_lcm_size", "should_split_heads", "dp_rank", "extra_config"}
    required = {f.name for f in dataclasses.fields(HiCacheStorageConfig)} - optional
    assert required == {
        "tp_rank",
        "tp_size",
        "pp_rank",
        "pp_size",
        "attn_cp_rank",
        "attn_cp_size",
        "is_mla_model",
        "enable_storage_metrics",
        "is_page_first_layout",
        "model_name",
    }


def test_arrival_and_update_can_be_told() -> None:
    """Every request passes one method on its way into the queue;
    these are all that change weights."""
    assert parameters(Scheduler._add_request_to_queue)[0] == "req"
    assert "self.waiting_queue.append(req)" in source(Scheduler._add_request_to_queue)
    assert "scheduler" in {f.name for f in dataclasses.fields(SchedulerWeightUpdaterManager)}
    every = {
        name
        for name in vars(SchedulerWeightUpdaterManager)
        if re.search("weight.*update|update.*weight", name)
    }
    changing = {target.rpartition(".")[2] for target in hooks.UPDATES}
    around = {
        "flush_cache_after_weight_update",
        "record_weight_version_after_update",
        "end_weight_update",
    }
    assert every - around == changing | {
        "init_weights_update_group",
        "destroy_weights_update_group",
    }


def test_end_is_told_to_the_cache() -> None:
    """By a scheduler that ends as it was asked to: what waits for the storage is written then."""
    assert "self.tree_cache.release_host_resources()" in source(Scheduler.release_host_resources)
    assert "if scheduler.gracefully_exit: scheduler.release_host_resources()" in source(
        run_scheduler_process
    )
