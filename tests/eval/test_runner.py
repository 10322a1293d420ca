"""Blocks, arms, cells and histories against fake endpoints:
the requests of each arm, their order, and the kept samples."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.errors import CommandError
from eval.run import Run, read_samples
from eval.serve.arms import ARMS, Arm
from eval.serve.latency import cell_rows
from eval.serve.plan import SERVER, Cell, Plan
from eval.serve.runner import load_facts, measure, side_by_side, turned
from eval.serve.workload import Load
from eval.server import free_port
from eval.task import Request, TextChunk
from tests.eval.fake_endpoint import FakeEndpoint, serving

Endpoints = tuple[FakeEndpoint, FakeEndpoint]


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    """A server without our cache and one with it."""
    with ExitStack() as stack:
        stock = stack.enter_context(serving(FakeEndpoint()))
        yield stock, stack.enter_context(serving(FakeEndpoint(chunk_cache=True)))


def arms_of(endpoints: Endpoints) -> list[Arm]:
    """Both as arms that are already there."""
    return [
        replace(ARMS["stock-lpm"], url=endpoints[0].url),
        replace(ARMS["ours"], url=endpoints[1].url),
    ]


def singles(count: int) -> list[Request]:
    """Requests that have nothing to do with each other."""
    return [Request(f"t:{i}", f"q{i}", (TextChunk(f"c{i}", f"text {i}"),)) for i in range(count)]


def take(folder: Path, plan: Plan, cells: Sequence[Cell]) -> Run:
    """Measure into a folder."""
    with Run(folder, kind="serve", spec={}, summarize=lambda samples: {"n": len(samples)}) as run:
        measure(run, plan, cells)
    return run


def test_every_request_goes_through_every_arm_in_turned_blocks(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    """A busy minute of the machine has to hit all arms alike."""
    run = take(tmp_path / "r", Plan(arms_of(endpoints), block=2), [Cell({}, singles(8))])
    order = [sample["arm"] for sample in run.samples]
    assert order[::2] == [
        "stock-lpm",
        "ours",
        "ours",
        "stock-lpm",
        "ours",
        "stock-lpm",
        "stock-lpm",
        "ours",
    ]
    assert Counter(order) == {"stock-lpm": 8, "ours": 8}
    assert [sample["block"] for sample in run.samples[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    for endpoint in endpoints:
        assert [question.split("\n\n")[-1] for question in endpoint.questions] == [
            f"q{i}" for i in range(8)
        ]


def test_samples_hold_times_counts_and_fates(endpoints: Endpoints, tmp_path: Path) -> None:
    run = take(tmp_path / "r", Plan(arms_of(endpoints), warm_up=1), [Cell({"k": 5}, singles(2))])
    by_key = {sample["key"]: sample for sample in run.samples}
    assert set(by_key) == {f"k=5/{arm}/t:{i}" for arm in ("stock-lpm", "ours") for i in (0, 1)}
    ours, stock = by_key["k=5/ours/t:1"], by_key["k=5/stock-lpm/t:1"]
    assert (ours["cell"], ours["request"], ours["num_chunks"], ours["warm_up"]) == (
        {"k": 5},
        "t:1",
        1,
        False,
    )
    assert by_key["k=5/ours/t:0"]["warm_up"] is True
    times = {"ttft_s", "e2e_s", "itl_s"}
    assert set(ours["metrics"]) == times | {
        "cached_share",
        "prefill_tokens",
        "hit_share",
        "recomputed_share",
    }
    assert ours["metrics"]["recomputed_share"] == 1.0
    assert ours["metrics"]["cached_share"] == (ours["prompt_tokens"] - 3) / ours["prompt_tokens"], (
        "by fates, if it has any"
    )
    assert ours["metrics"]["ttft_s"] <= ours["metrics"]["e2e_s"]
    assert ours["metrics"]["prefill_tokens"] == 3, "what is recomputed is computed"
    assert ours["chunkcache"] == {
        "chunks_hit": 1,
        "chunks_planned": None,
        "predicted_exact": None,
        "turns_reused": None,
        "fallbacks": [],
        "num_dropped": 1,
        "fused_hit": 0,
        "sampled": False,
    }
    assert stock["fates"] is None
    assert stock["metrics"]["prefill_tokens"] == stock["prompt_tokens"] - stock["cached_tokens"]


def test_tiers_are_told_once_the_storage_has_written_all(tmp_path: Path) -> None:
    """What was loaded with each request; what the tiers have at the end,
    or the next start would find less."""
    with serving(FakeEndpoint(chunk_cache=True, has_tiers=True, num_waiting=5)) as endpoint:
        plan = Plan([replace(ARMS["ours"], url=endpoint.url)])
        run = take(tmp_path / "r", plan, [Cell({}, singles(1))])
    assert plan.facts["tiers"] == {"ours": [{"host": {"tokens": 7}, "storage": {"queue": 0}}]}
    assert run.samples[0]["chunkcache"]["loaded"] == 2
    (row,) = cell_rows(run.samples)
    assert row["loaded_share"] == 2 / run.samples[0]["prompt_tokens"]


@pytest.mark.parametrize(("reports", "cached"), [(True, 0), (False, None)])
def test_nothing_cached_is_zero_only_where_the_server_counts(
    tmp_path: Path, reports: bool, cached: int | None
) -> None:
    """SGLang leaves a zero out; without it, an arm that never finds anything would have no share,
    or too high a one."""
    with serving(FakeEndpoint(is_cold=True, cache_report=reports)) as endpoint:
        plan = Plan([Arm("a", "", route="chat", url=endpoint.url)])
        run = take(tmp_path / "r", plan, [Cell({}, singles(1))])
    assert run.samples[0]["cached_tokens"] == cached
    assert run.samples[0]["metrics"].get("cached_share") == cached


def test_what_was_cached_is_known_by_fates_where_usage_does_not_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server without --enable-cache-report:
    ours tells all the same, another is named, for it has no share at all."""
    silent = FakeEndpoint(is_cold=True, cache_report=False, chunk_cache=True)
    with serving(silent) as endpoint:
        arms = [
            replace(ARMS["ours"], url=endpoint.url),
            Arm("theirs", "", route="chat", url=endpoint.url),
        ]
        asked = Request("t:0", "a question of so many tokens", (TextChunk("c", "text"),))
        run = take(tmp_path / "r", Plan(arms), [Cell({}, [asked])])
    ours, theirs = run.samples
    assert ours["metrics"]["cached_share"] == ours["fates"]["exact"] / ours["prompt_tokens"] > 0
    assert "cached_share" not in theirs["metrics"]
    told = capsys.readouterr().err
    assert "eval: theirs does not report cached tokens: start it with --enable-cache-report" in told
    assert told.count("--enable-cache-report") == 1


def test_clock_goes_on_from_block_to_block(endpoints: Endpoints, tmp_path: Path) -> None:
    """Fates over time are drawn over an arm's own load, without the time in which others were
    measured."""
    run = take(tmp_path / "r", Plan(arms_of(endpoints), block=2), [Cell({}, singles(6))])
    for arm in ("stock-lpm", "ours"):
        mine = [sample for sample in run.samples if sample["arm"] == arm]
        for early, late in itertools.pairwise(mine):
            assert early["due_s"] <= early["sent_s"] < early["done_s"] <= late["due_s"]


def test_closed_loop_keeps_so_many_in_flight(endpoints: Endpoints, tmp_path: Path) -> None:
    for endpoint in endpoints:
        endpoint.delay_s = 0.05
    take(
        tmp_path / "r",
        Plan(arms_of(endpoints), block=0),
        [Cell({}, singles(9), load=Load(clients=3))],
    )
    assert [endpoint.most_in_flight for endpoint in endpoints] == [3, 3]


def test_open_loop_measures_waiting_in_the_servers_queue(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    """Ten requests a second at a server that takes 0.2 s for one:
    each waits longer than the one before."""
    endpoints[0].delay_s, endpoints[0].serial = 0.2, True
    load = Load("trace")
    requests = [replace(request, arrival_s=0.1 * i) for i, request in enumerate(singles(6))]
    run = take(
        tmp_path / "r", Plan(arms_of(endpoints)[:1], block=0), [Cell({}, requests, load=load)]
    )
    times = [sample["metrics"]["ttft_s"] for sample in run.samples]
    assert times == sorted(times)
    assert times[0] >= 0.2
    assert times[-1] >= 0.2 * 6 - 0.1 * 5
    assert endpoints[0].most_in_flight >= 3
    for i, sample in enumerate(run.samples):
        assert sample["due_s"] - run.samples[0]["due_s"] == pytest.approx(0.1 * i)
        assert sample["late_s"] == 0


def test_bystanders_decode_while_a_block_is_measured(endpoints: Endpoints, tmp_path: Path) -> None:
    """Their gaps are those of the block; nobody decodes while the other arm is measured."""
    for endpoint, stalled_s in zip(endpoints, (0.002, 0.04), strict=True):
        endpoint.delay_s, endpoint.stalled_s = 0.1, stalled_s
    run = take(
        tmp_path / "r", Plan(arms_of(endpoints), block=2, bystanders=2), [Cell({}, singles(4))]
    )
    stock, ours = (
        [s for s in run.samples if "gaps_s" in s and s["arm"] == arm]
        for arm in ("stock-lpm", "ours")
    )
    assert [s["key"] for s in stock] == ["stock-lpm/bystanders:0", "stock-lpm/bystanders:2"]
    assert [s["block"] for s in ours] == [0, 1]
    for sample in ours:
        assert (
            0.03
            < sample["metrics"]["itl_bystander_p50_s"]
            <= sample["metrics"]["itl_bystander_p99_s"]
        )
        assert sum(sample["gaps_s"]) <= 2 * (sample["done_s"] - sample["due_s"]) + 0.1, (
            "two streams, for the block's time"
        )
    assert max(s["metrics"]["itl_bystander_p50_s"] for s in stock) < 0.03
    assert [len(endpoint.aborted) for endpoint in endpoints] == [4, 4], (
        "two streams in each of two blocks"
    )


def test_bystanders_first_gap_is_not_their_prefill(endpoints: Endpoints, tmp_path: Path) -> None:
    """A stream takes as long to begin as a prefill; a token without text is a token."""
    endpoints[0].prefill_s, endpoints[0].delay_s = 0.3, 0.2
    run = take(tmp_path / "r", Plan(arms_of(endpoints)[:1], bystanders=1), [Cell({}, singles(1))])
    (sample,) = (sample for sample in run.samples if "gaps_s" in sample)
    assert max(sample["gaps_s"]) < 0.25


def test_bystander_that_is_refused_ends_the_run(tmp_path: Path) -> None:
    """Otherwise the streams that are left would be called all of them."""
    with serving(FakeEndpoint(is_sglang=False)) as endpoint:
        plan = Plan([Arm("theirs", "", route="chat", url=endpoint.url)], bystanders=1)
        with pytest.raises(
            CommandError, match=r"/generate, for --bystanders: ClientResponseError: 404"
        ):
            take(tmp_path / "r", plan, [Cell({}, singles(1))])


CONVERSATION = [
    replace(request, conversation="c", reply=f"reply {i}", arrival_s=0.01 * i)
    for i, request in enumerate(singles(3))
]


@pytest.mark.parametrize("load", [Load(clients=3), Load("trace")])
def test_turn_waits_for_its_predecessor_and_shows_the_arms_own_answer(
    endpoints: Endpoints, tmp_path: Path, load: Load
) -> None:
    """An application cannot send a turn before the user has read the answer;
    what it waited is told, not timed."""
    endpoints[0].delay_s = 0.1
    run = take(
        tmp_path / "r", Plan(arms_of(endpoints), block=2), [Cell({}, CONVERSATION, load=load)]
    )
    first, second, third = endpoints[0].received
    assert first["answered"] <= second["at"]
    assert [m["content"] for m in third["messages"]] == [
        "text 0\n\nq0",
        "an answer",
        "text 1\n\nq1",
        "an answer",
        "text 2\n\nq2",
    ]
    assert [m["content"] for m in endpoints[1].received[1]["messages"]] == ["q0", "an answer", "q1"]
    assert second["at"] < third["at"]
    late = next(sample for sample in run.samples if sample["key"] == "stock-lpm/t:1")
    assert late["late_s"] >= 0.08
    before = next(sample for sample in run.samples if sample["key"] == "stock-lpm/t:0")
    assert late["due_s"] == pytest.approx(before["done_s"])


def test_conversations_of_two_cells_have_different_ids(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    """Otherwise the second cell would find the first one's turns in our server's memory."""
    cells = [Cell({"k": k}, CONVERSATION) for k in (1, 2)]
    take(tmp_path / "r", Plan(arms_of(endpoints)), cells)
    ids = [body["conversation_id"] for body in endpoints[1].received]
    assert len(set(ids[:3])) == len(set(ids[3:])) == 1
    assert ids[0] != ids[3]


def test_failed_requests_are_kept_and_the_others_go_on(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    """Also within a conversation: the next turn shows what was answered."""
    requests = [replace(CONVERSATION[0], question="refused"), CONVERSATION[1], *singles(5)[3:]]
    run = take(tmp_path / "r", Plan(arms_of(endpoints)), [Cell({}, requests)])
    failed = [sample for sample in run.samples if "error" in sample]
    assert [(sample["arm"], sample["request"]) for sample in failed] == [
        ("stock-lpm", "t:0"),
        ("ours", "t:0"),
    ]
    assert all(sample["metrics"] == {} for sample in failed)
    assert len(run.samples) == 8
    assert len(endpoints[0].received[1]["messages"]) == 1


def test_cells_on_the_same_server_start_from_an_empty_cache(
    endpoints: Endpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cell must not profit from the one before;
    but others may use a server that was already there."""
    plan = Plan(arms_of(endpoints), flush=True)
    take(tmp_path / "r", plan, [Cell({"k": k}, singles(2)) for k in (3, 5, 10)])
    assert [endpoint.num_flushed for endpoint in endpoints] == [3, 3]
    assert [endpoint.num_forgotten for endpoint in endpoints] == [0, 3], (
        "counts of what was asked for are ours alone"
    )
    assert plan.facts["servers"]["ours"]["flushed"] is True
    assert "profit" not in capsys.readouterr().err
    cells = [Cell({"k": k}, singles(1)) for k in (3, 5)]
    take(tmp_path / "s", replace(plan, flush=False), cells)
    assert [(endpoint.num_flushed, endpoint.num_forgotten) for endpoint in endpoints] == [
        (3, 0),
        (3, 3),
    ]
    assert "stock-lpm, ours: later cells reuse" in capsys.readouterr().err
    assert plan.facts["servers"]["ours"]["flushed"] is False


def test_server_that_cannot_flush_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(FakeEndpoint(can_flush=False)) as endpoint:
        plan = Plan([Arm("theirs", "", route="chat", url=endpoint.url)], flush=True)
        take(tmp_path / "r", plan, [Cell({"k": k}, singles(1)) for k in (3, 5)])
    assert plan.facts["servers"]["theirs"]["flushed"] is False
    assert capsys.readouterr().err.count("its cache is not empty") == 1


def test_facts_say_what_the_servers_are(endpoints: Endpoints, tmp_path: Path) -> None:
    plan = Plan([*arms_of(endpoints), Arm("gone", "", adapter="contextpilot", url="http://x")])
    plan = replace(plan, contextpilot_python=Path("/bin/false"))
    take(tmp_path / "r", plan, [Cell({}, singles(1))])
    facts = load_facts(tmp_path / "r")
    assert facts == plan.facts
    assert facts["servers"]["ours"]["model"] == "fake"
    assert (
        facts["servers"]["ours"]["chunk_cache"],
        facts["servers"]["stock-lpm"]["chunk_cache"],
    ) == (True, False)
    assert facts["servers"]["ours"]["gate"] == [{"passed": True}]
    assert "contextpilot" in facts["skipped"]["gone"]
    assert endpoints[0].received[0]["model"] == "fake-model"


def test_arm_called_ours_without_our_cache_is_refused(endpoints: Endpoints, tmp_path: Path) -> None:
    """A stock server under our name would be reported as our result."""
    wrong = replace(ARMS["ours"], url=endpoints[0].url)
    with pytest.raises(CommandError, match="does not run the chunk cache"):
        take(tmp_path / "r", Plan([wrong]), [Cell({}, singles(1))])


def test_unreachable_server_is_one_line(tmp_path: Path) -> None:
    unreachable = Arm("a", "", route="chat", url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(CommandError, match="a: no server answers") as error:
        take(tmp_path / "r", Plan([unreachable]), [Cell({}, singles(1))])
    assert "\n" not in str(error.value)


def test_server_that_dies_ends_the_run_with_what_there_is(tmp_path: Path) -> None:
    """And the same command goes on from there;
    what the arm had served is sent again, unmeasured."""
    folder, requests = tmp_path / "r", [*CONVERSATION, *singles(8)[3:]]
    with serving(FakeEndpoint()) as stays, serving(FakeEndpoint()) as dies:
        kept = [Arm("stays", "", route="chat", url=stays.url)]
        plan = Plan([*kept, Arm("dies", "", route="chat", url=dies.url)], block=2)

        class Dying(Run):
            def add_all(self, samples: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
                super().add_all(samples)
                if "dies/t:1" in self:
                    dies.is_down = True

        with (
            pytest.raises(CommandError, match="dies: no server answers"),
            Dying(
                folder, kind="serve", spec={}, summarize=lambda samples: {"n": len(samples)}
            ) as run,
        ):
            measure(run, plan, [Cell({}, requests)])
        assert [sample["key"] for sample in run.samples][:4] == [
            "stays/t:0",
            "stays/t:1",
            "dies/t:0",
            "dies/t:1",
        ]
        assert not [sample for sample in run.samples if "error" in sample]
        dies.is_down = False
        num_before = len(dies.received)
        again = take(folder, replace(plan, facts=load_facts(folder)), [Cell({}, requests)])
    assert {sample["key"] for sample in again.samples} == {
        f"{arm}/t:{i}" for arm in ("stays", "dies") for i in range(8)
    }
    questions = [question.split("\n\n")[-1] for question in dies.questions[num_before:]]
    assert questions[:2] == ["q0", "q1"], "sent again"
    assert len(dies.received[num_before + 2]["messages"]) == 5, (
        "the conversation goes on after them"
    )
    assert len(questions) == 8
    mine = [sample for sample in again.samples if sample["arm"] == "dies"]
    assert [s["due_s"] for s in mine] == sorted(s["due_s"] for s in mine)
    assert load_facts(folder)["resumed_at"][0]["samples"] == len(run.samples)


def test_block_that_was_kept_in_part_is_taken_again(endpoints: Endpoints, tmp_path: Path) -> None:
    """Killed in the middle of writing it: the requests that are missing would be missing for good,
    and their block be another."""
    folder, requests, plan = tmp_path / "r", singles(6), Plan(arms_of(endpoints), block=3)
    take(folder, plan, [Cell({}, requests)])
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    # 7: one of three of a second block
    (folder / "samples.jsonl").write_text("".join(lines[:7]) + lines[7][:20])
    record = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps(record | {"complete": False}))
    again = take(folder, plan, [Cell({}, requests)])
    assert [sample["key"] for sample in again.samples] == [
        json.loads(line)["key"] for line in lines
    ]
    assert [json.dumps(s, separators=(",", ":")) + "\n" for s in again.samples[:6]] == lines[:6]
    assert again.samples[6] != json.loads(lines[6])
    assert read_samples(folder) == again.samples


def test_turned_puts_every_arm_in_every_place_equally_often() -> None:
    for count in (1, 2, 3, 4):
        places = Counter(
            (arm, place)
            for number in range(2 * count)
            for place, arm in enumerate(turned(range(count), number))
        )
        assert set(places.values()) == {2}


def test_cells_stand_side_by_side_where_they_share_no_server() -> None:
    """Windows of our server can take turns; rates, or stock's one server, cannot."""
    ours, stock = ARMS["ours"], ARMS["stock-lpm"]
    windows = [
        Cell({"window": n}, (), flags=("--chunkcache-window-requests", str(n)))
        for n in (10, 100, 1000)
    ]
    assert [len(group) for group in side_by_side(windows, [ours])] == [3]
    both = [ours, ARMS["craft"]]
    assert [
        len(group) for group in side_by_side([*windows, replace(windows[0], flags=("x",))], both)
    ] == [3, 1]
    assert [len(group) for group in side_by_side(windows, [ours, stock])] == [1, 1, 1]
    rates = [Cell({"rate": n}, ()) for n in (1, 2)]
    assert [len(group) for group in side_by_side(rates, [ours])] == [1, 1]
    servers = [Cell({SERVER: n}, ()) for n in (1, 2)]
    assert [len(group) for group in side_by_side(servers, [ours, stock])] == [2]


def test_server_that_is_already_there_takes_no_flags(endpoints: Endpoints, tmp_path: Path) -> None:
    """A window that did not reach the server would be reported as measured."""
    cell = Cell({"window": 1}, singles(1), flags=("--chunkcache-window-requests", "1"))
    with pytest.raises(CommandError, match="a running server cannot be given"):
        take(tmp_path / "r", Plan(arms_of(endpoints)), [cell])


@pytest.mark.parametrize(
    ("asked", "at_most", "sent"),
    [(None, None, 8), (5, None, 5), (None, 3, 3), (50, 3, 3), (2, 3, 2)],
)
def test_answers_are_as_long_as_the_trace_says_but_no_longer_than_the_user(
    endpoints: Endpoints, tmp_path: Path, asked: int | None, at_most: int | None, sent: int
) -> None:
    """Full-length answers of a production trace take hours on a small machine."""
    requests = [replace(request, max_new_tokens=asked) for request in singles(1)]
    take(tmp_path / "r", Plan(arms_of(endpoints), max_new_tokens=at_most), [Cell({}, requests)])
    assert [body["max_tokens"] for body in endpoints[0].received] == [sent]
