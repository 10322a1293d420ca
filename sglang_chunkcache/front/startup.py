"""Before the first request: the index opens and answers, every rank runs our cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from retrieval.errors import RetrievalError
from sglang_chunkcache import quiet
from sglang_chunkcache.config import ChunkCacheConfig, flag_name
from sglang_chunkcache.front.search import default_mode
from sglang_chunkcache.start_steps import step

if TYPE_CHECKING:
    from retrieval.hits import Searcher
    from retrieval.reranker import Reranker
    from sglang_chunkcache.front.parts import Parts

logger = logging.getLogger(__name__)


def open_retriever(config: ChunkCacheConfig) -> Searcher:
    """The index and encoder of the flags, after a search that shows that they work.

    Raises:
        RetrievalError: an index or encoder that cannot be served, a mode that the index does not
            offer, or packages missing.
    """
    assert config.index is not None
    import torch

    # of this process, in which only the encoder computes
    torch.set_num_threads(config.retrieve_threads)
    try:
        from retrieval.opening import open_searcher

        retriever = open_searcher(
            config.index,
            encoder=config.encoder,
            device=config.retrieve_device,
            verify=config.index_verify == "on",
            threads=config.retrieve_threads,
        )
        mode, modes = default_mode(retriever, config), retriever.modes
        if mode not in modes:
            offers = f"the index {config.index} offers {', '.join(modes)}"
            raise RetrievalError(f"{flag_name('retrieve_mode')} {mode}: {offers}")
        tried = "fusion" if mode == "filled" else mode  # words alone might fill the list
        retriever.search(["Does it work?"], k=1, mode=tried, nprobe=config.retrieve_nprobe)
    except ModuleNotFoundError as error:  # FAISS at once, others only where the index needs them
        missing = f"needs the extra 'retrieval': {error.name} is not installed"
        raise RetrievalError(missing) from None
    return retriever


def open_reranker(config: ChunkCacheConfig) -> Reranker:
    """The cross-encoder of the flags, after a pair that shows that it works.
    Raises RetrievalError."""
    from retrieval.hits import Hit
    from retrieval.passage import Passage
    from retrieval.reranker import Reranker

    assert config.reranker is not None
    reranker = Reranker(config.reranker, device=config.retrieve_device)
    tried = Passage("", "", "", "It does.", 0, 0, 0)
    reranker.rerank("Does it work?", [Hit(tried, 0.0, "dense")], k=1)
    return reranker


def calibrates(config: ChunkCacheConfig, ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the start-up measures where the model keeps its evidence:
    where a selector reads it that is not known yet."""
    is_auto, is_read = config.calibrate == "auto", config.selector == "critical"
    is_wanted = config.calibrate == "on" or (is_auto and is_read)
    return is_wanted and not all(rank["calibration"]["figures"] for rank in ranks)


def warm_up(server_args: Any) -> bool:
    """SGLang's warm-up. `/health` goes on saying 503 until `check_ranks` is done: a server that
    calibrates answers nothing for longer than probes wait."""
    from sglang.srt.entrypoints.http_server import _execute_server_warmup

    step("first request")
    is_warm: bool = _execute_server_warmup(server_args)
    if is_warm:
        _set_status("Starting")
    return is_warm


def check_ranks(server_args: Any, front: Parts) -> None:
    """Start-up check: every rank reports our cache, and the tokenizer suits us; then the front is
    ready. Otherwise the server stops, with the reason."""
    from sglang.srt.utils import kill_process_tree

    config, url = front.config, server_args.url()
    step("asking the ranks")
    try:
        # where both are set the admin key opens no statistics
        key = server_args.api_key or server_args.admin_api_key
        session = requests.Session()
        session.headers.update({"Authorization": f"Bearer {key}"} if key else {})
        session.verify = session.trust_env = False  # no proxy between the server and itself
        for scheme in ("http://", "https://"):  # the port may not be open yet
            retry = Retry(connect=40, backoff_factor=0.2, backoff_max=2)
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        answer = session.get(f"{url}/chunkcache/stats", timeout=60)
        answer.raise_for_status()
        ranks = answer.json()["ranks"]
        parts = ("pool",) if config.is_stock else ("free", "evictable", "protected")
        logger.info(
            "chunk cache: in on %d rank(s), each with a KV pool of %d tokens; tree: %s",
            len(ranks),
            sum(ranks[0][part] for part in parts),
            ranks[0]["tree"] if config.is_stock else "chunk",
        )
        if config.reuse == "fused" and calibrates(config, ranks):
            step("calibrating the selection")
            told = session.post(f"{url}/chunkcache/calibrate", json={})
            level = logging.INFO if told.ok else logging.WARNING
            logger.log(level, "chunk cache: selection calibrated: %s", told.text)
        _set_status("Up")
        quiet.started()
        front.readiness.is_started = True
        ready = "chunk cache: ready, reuse %s: %s/rag/v1, live page %s/chunkcache/"
        logger.info(ready, config.reuse, url, url)
    except Exception as error:
        logger.critical("chunk cache: start-up check failed, stopping: %s", error)
        kill_process_tree(os.getpid())


def _set_status(name: str) -> None:
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    get_global_state().tokenizer_manager.server_status = ServerStatus[name]
