"""What a replay's host memory keeps, and what leaves it."""

import pytest

from eval.errors import PolicyError
from eval.replay.host_tier import HostTier
from eval.replay.offloading import HostAdmission
from radix_ext import ChunkPrefixTree, Tier
from tests.kit.integrity import violations_of
from tests.kit.letters import make_chunks


class Served:
    """A tree and its host memory, all chunks of one token."""

    def __init__(self, admission: HostAdmission, capacity: int) -> None:
        self.tree = ChunkPrefixTree(max_nodes=100)
        self.host = HostTier(
            self.tree, "reused", admission, capacity=capacity, capacity_tokens=None
        )

    def __call__(self, names: str) -> str:
        """Serve a request; returns what left host memory for it."""
        leaf = self.tree.insert("", make_chunks(names, 1), rank=0, tier=Tier.DEVICE, promoted_len=0)
        assert leaf is not None
        gone = self.host.offload(leaf.path())
        assert [*violations_of(self.host)] == []
        return "".join(node.chunk_id for node in gone)

    @property
    def held(self) -> str:
        return " ".join(
            sorted("".join(above.chunk_id for above in node.path()) for node in self.host._nodes)
        )


def test_second_request_copies_what_it_found() -> None:
    """Parents first; the chunk that it was the first to ask for stays behind."""
    served = Served("reused", capacity=9)
    served("ab")
    assert served.held == ""
    served("abc")
    assert served.held == "a ab"


def test_room_is_made_by_the_device_rule_and_never_from_the_chain_itself() -> None:
    served = Served("all", capacity=3)
    for names in ("ab", "x", "ab"):
        served(names)
    assert served("cd") == "xb"
    assert served("ae") == "d"
    assert served.held == "a ae c"
    assert served("aefg") == "c"
    assert served.held == "a ae aef"


def test_unknown_admission_is_refused() -> None:
    with pytest.raises(
        PolicyError, match="host admission must be one of reused, promoted, either, all"
    ):
        Served("hot", capacity=1)  # type: ignore[arg-type]
