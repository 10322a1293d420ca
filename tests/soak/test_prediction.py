"""Does the front's prediction equal SGLang's report? Requests one at a time through the real
server.

For every request the front predicts how many prompt tokens the rank holds (head and predicted
chain). SGLang's own `cached_tokens` must equal the prediction if the chain ends before the last
chunk, and be at least that if all chunks hit: the excess is then a match inside the question.
Without a predicted chunk only the head can match.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from eval.http import get, post
from eval.random_model import SHAPES, write_random_model
from eval.server import Server
from eval.task import Request, Source, load_task, requests_of
from eval.tasks.world import world_requests
from tests.soak.answers import rag_body
from tests.soak.sizes import scaled

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def is_right(url: str, request: Request) -> tuple[bool, int]:
    """Whether the prediction was right, and how many chunks were predicted to hit."""
    reply = post(url + "/rag/v1/chat/completions", rag_body(request, 1, return_meta_info=True))
    ours, cached = reply["chunkcache"], reply["choices"][0]["meta_info"]["cached_tokens"]
    planned, predicted = ours["chunks_planned"], ours["predicted_exact"]
    if planned == len(ours["order"]):
        return cached >= predicted, planned
    return (cached == predicted if planned else cached <= ours["head_tokens"]), planned


def check(flags: Sequence[str], requests: Sequence[Request], log: Path) -> None:
    """All predictions are right, some of them of hits, and the mirror agrees with the rank."""
    with Server(flags, log=log) as server:
        found = [is_right(server.url, request) for request in requests]
        stats = get(server.url + "/chunkcache/stats")
    assert [r.id for r, (right, _) in zip(requests, found, strict=True) if not right] == []
    assert sum(planned > 0 for _, planned in found) > len(found) // 10
    assert stats["ranks"][0]["mirror"]["agrees"]


def test_predictions_are_right_under_eviction(tmp_path: Path) -> None:
    """The generated world on a pool of a few prompts."""
    flags = ["--model-path", "bundled", "--max-total-tokens", "2400"]
    check(flags, world_requests(scaled(200, 30), seed=1), tmp_path / "server.log")


@pytest.mark.data
def test_predictions_are_right_on_real_text(tmp_path: Path, data_dir: Path) -> None:
    """MTRAG's texts with their own lists, a random model."""
    source = Source("mtrag", data_dir, requests=scaled(300, 60))
    task = load_task(source)
    texts = [passage.text for passage in task.passages]
    model = write_random_model(tmp_path / "model", SHAPES[1], texts)
    flags = ["--model-path", str(model), "--max-total-tokens", "400000"]
    check(flags, requests_of(source, task), tmp_path / "server.log")
