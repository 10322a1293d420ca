"""The tensors of the store: what a blob and its scores must be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from radix_ext.variants import Variant  # noqa: E402
from sglang_chunkcache.fusion.store import ChunkScores, HostBlob  # noqa: E402


def test_bytes_count_keys_values_and_scores() -> None:
    """An uncounted part would let the store outgrow its limit."""
    blob = HostBlob(torch.zeros(2, 3, 1, 3), torch.zeros(2, 3, 1, 3))
    scores = ChunkScores((), (), 1.0, torch.zeros(3), torch.zeros(3))
    assert Variant((), blob, scores).nbytes == 3 * (2 * 2 * 3 * 4 + 2 * 4)


def test_blob_gives_back_what_it_holds() -> None:
    """Keys first."""
    keys, values = torch.ones(2, 5, 1, 3), torch.zeros(2, 5, 1, 3)
    blob = HostBlob(keys, values)
    assert blob.read()[0] is keys
    assert blob.read()[1] is values
    assert blob.num_tokens == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HostBlob(torch.zeros(2, 1, 3), torch.zeros(2, 1, 3)), "must be"),
        (lambda: HostBlob(torch.zeros(2, 4, 1, 3), torch.zeros(2, 4, 1)), "must be"),
        (lambda: HostBlob(torch.zeros(2, 4, 1, 3), torch.zeros(2, 5, 1, 3)), "must be"),
        (
            lambda: HostBlob(torch.zeros(2, 4, 1, 3), torch.zeros(2, 4, 1, 3, device="meta")),
            "values must be on the cpu",
        ),
        (lambda: HostBlob(torch.zeros(2, 8, 1, 3)[:, :4], torch.zeros(2, 4, 1, 3)), "keys must own their memory"),
        (lambda: ChunkScores((1.0,), (), 1.0, torch.zeros(2), torch.zeros(2)), "inter must have 0"),
        (lambda: ChunkScores((), (), 1.0, torch.zeros(2), torch.zeros(3)), "context and received"),
        (lambda: ChunkScores((), (), 1.0, torch.zeros(2, 1), torch.zeros(2, 1)), "context and received"),
    ],
)
def test_malformed_parts_are_refused(make: Callable[[], object], message: str) -> None:
    """Each Raises of HostBlob and ChunkScores."""
    with pytest.raises(ValueError, match=message):
        make()
