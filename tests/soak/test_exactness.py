"""Does reuse change an answer? Our server against stock SGLang, token by token (design contract 1).

Our server gets RAG requests with a pool that is too small for them, prefill pieces smaller than a
chunk and SGLang's strict memory checks. The same prompts are then sent, as token ids, to stock
SGLang, and to stock SGLang without any reuse. The tolerance is the largest difference of a log
probability between the two stock runs. Our first different token is excused only if stock's two
best tokens are closer than that.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from eval.data.random_text import WORDS
from eval.http import get
from eval.random_model import SHAPES, write_random_model
from eval.server import Server
from eval.task import Request, Source, load_task, requests_of
from eval.tasks.world import world_requests
from tests.soak.answers import (
    NEVER_REUSE,
    STRICT,
    differences,
    logprob_difference,
    run_ours,
    run_stock,
)
from tests.soak.sizes import scaled

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
MAX_NEW_TOKENS = 12


def compare(flags: Sequence[str], requests: Sequence[Request], logs: Path) -> None:
    """No answer differs beyond stock's own rounding, while chunks are reused and evicted."""
    with Server(flags, log=logs / "ours.log", env=STRICT) as server:
        prompts, ours, reused = run_ours(server.url, requests, MAX_NEW_TOKENS)
        rank = get(server.url + "/chunkcache/stats")["ranks"][0]
    with Server(["--stock", *flags], log=logs / "stock.log") as server:
        stock = [run_stock(server.url, ids, MAX_NEW_TOKENS) for ids in prompts]
    with Server(["--stock", *flags], log=logs / "miss.log", env=NEVER_REUSE) as server:
        miss = [run_stock(server.url, ids, MAX_NEW_TOKENS) for ids in prompts]
    tolerance = max(logprob_difference(a, b) for a, b in zip(stock, miss, strict=True))
    found = differences(miss, ours)
    print(
        f"{reused} of {sum(map(len, prompts))} tokens reused, {rank['evicted_chunks']} chunks"
        f" evicted, {len(found)} differ"
    )
    assert [each for each in found if each.gap > tolerance] == []
    assert tolerance < 0.02
    assert reused > 0.1 * sum(map(len, prompts))
    assert rank["evicted_chunks"] > 0
    assert rank["mirror"]["agrees"]


def test_bundled_model_answers_as_stock(tmp_path: Path) -> None:
    """Its answers are right ones, so a wrong position or chunk shows."""
    pool = ["--chunked-prefill-size", "32", "--max-total-tokens", "2400"]
    compare(["--model-path", "bundled", *pool], world_requests(scaled(240, 40), seed=0), tmp_path)


@pytest.mark.data
def test_random_model_answers_as_stock_on_real_text(tmp_path: Path, data_dir: Path) -> None:
    """Random weights have near ties, where any difference of KV shows."""
    source = Source("mtrag", data_dir, requests=scaled(200, 30), k=4)
    model = write_random_model(tmp_path / "model", SHAPES[1], [" ".join(WORDS)] * 50)
    pool = ["--chunked-prefill-size", "128", "--max-total-tokens", "16000"]
    compare(["--model-path", str(model), *pool], requests_of(source, load_task(source)), tmp_path)
