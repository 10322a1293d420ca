"""What a replay expects of an arm: from the arm's own flags, and only where a replay knows."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from eval.serve.arms import ARMS, parse_arm
from eval.serve.expected import expected_hit_share, replay_settings
from eval.serve.plan import Cell
from eval.task import Request, TextChunk
from sglang_chunkcache import config


def requests(*lists: str, conversation: str | None = None) -> list[Request]:
    return [
        Request(f"t:{n}", "?", tuple(TextChunk(name, name) for name in names), conversation=conversation)
        for n, names in enumerate(lists)
    ]


def cell(*lists: str, flags: tuple[str, ...] = (), conversation: str | None = None) -> Cell:
    return Cell({}, requests(*lists, conversation=conversation), flags=flags)


def share(arm: str, measured: Cell, *, warm_up: int = 0, capacity: int | None = None) -> float | None:
    flags = [*ARMS[arm].flags, *measured.flags]
    return expected_hit_share(ARMS[arm], measured, flags=flags, warm_up=warm_up, capacity=capacity)


def test_order_decides() -> None:
    """`ours` puts the cached chain first; the retriever's order finds nothing of `ba` after `ab`."""
    assert share("ours", cell("ab", "ba")) == 0.5
    assert share("ours", cell("ab", "ba", flags=("--chunkcache-order", "retriever"))) == 0.0


def test_warm_up_fills_the_cache_and_is_not_counted() -> None:
    """As in the measured share."""
    assert share("ours", cell("ab", "ba"), warm_up=1) == 1.0
    assert share("ours", cell("ab"), warm_up=1) is None


def test_a_cells_flags_win() -> None:
    """A chunk seen twice is promoted under threshold 2 and inserted; under 3 the third request still finds nothing."""
    lists = ("ab", "ab", "ab")
    assert share("craft", cell(*lists)) == pytest.approx(1 / 3)
    assert share("craft", cell(*lists, flags=("--chunkcache-promotion-threshold", "3"))) == 0.0
    assert share("craft", cell(*lists, flags=("--chunkcache-promotion-threshold", "1"))) == pytest.approx(2 / 3)


def test_capacity() -> None:
    """A pool of two chunks forgets what one of unlimited size still has."""
    assert share("ours", cell("ab", "cd", "ab"), capacity=2) == 0.0
    assert share("ours", cell("ab", "cd", "ab")) == pytest.approx(1 / 3)


def test_conversations_and_repeated_chunks() -> None:
    """A later turn's chunks come after its history and are not counted. A chunk listed twice counts once."""
    assert share("ours", cell("ab", "ab", conversation="talk")) == 0.0
    first, later, alone = *requests("ab", "cd", conversation="talk"), *requests("ab")
    assert share("ours", Cell({}, [first, later, alone])) == 0.5
    assert share("ours", Cell({}, [first, later]), warm_up=1) is None
    assert share("ours", cell("aab", "aab")) == 0.5


def test_system_prompts_share_no_chain() -> None:
    """The text before the chunks is part of every prefix."""
    ab, ba = requests("ab", "ba")
    assert share("ours", Cell({}, [ab, replace(ba, system="Be brief.")])) == 0.0
    assert share("ours", Cell({}, [ab, ba])) == 0.5


def test_the_longer_chain_is_taken() -> None:
    """As the server does: of two cached chains the one with more text, not the one with more chunks."""
    texts = {"a": "a", "b": "b", "l": "a long text of many words"}
    short, long, both = ([TextChunk(name, texts[name]) for name in names] for names in ("ab", "l", "abl"))
    cell = Cell({}, [Request(f"t:{n}", "?", tuple(chunks)) for n, chunks in enumerate((short, long, both))])
    assert share("ours", cell, warm_up=2) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["stock-lpm", "no-cache", "fused", "cacheblend", "contextpilot"])
def test_nothing_is_expected_of_others(name: str) -> None:
    """Stock SGLang says nothing of chunks, moved KV is no prefix, and another's order is not replayed."""
    assert share(name, cell("ab", "ab")) is None


def test_nothing_is_expected_of_a_server_whose_flags_are_not_known() -> None:
    """It may run anything."""
    arm = parse_arm("ours=http://127.0.0.1:1")
    assert expected_hit_share(arm, cell("ab", "ab"), flags=(), warm_up=0, capacity=None) is None
    assert expected_hit_share(ARMS["ours"], cell("ab", "ab"), flags=(), warm_up=0, capacity=None) is None


def test_a_flags_two_spellings() -> None:
    """Flags after -- may have either form; the last one counts, as with the launcher."""
    assert replay_settings(["--chunkcache-order=retriever", "--x"], capacity=None).order == "retriever"
    flags = ["--chunkcache-window-requests", "5", "--chunkcache-window-requests=7"]
    assert replay_settings(flags, capacity=None).window == 7


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm.is_ours])
def test_settings_are_what_the_launcher_reads(name: str) -> None:
    """Names of flags and their values, for every arm with a server of ours."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    config.add_flags(parser)
    theirs = config.from_flags(parser.parse_known_args(list(ARMS[name].flags))[0])
    mine = replay_settings(ARMS[name].flags, capacity=7)
    for field in ("order", "tail", "eviction", "admission"):
        assert getattr(mine, field) == getattr(theirs, field)
    assert (mine.window, mine.threshold) == (theirs.window_requests, theirs.promotion_threshold)
    assert (mine.max_visits, mine.capacity) == (theirs.max_search_visits, 7)
    assert mine.dedup == ("off" if theirs.dedup == "off" else "shown")
