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
from statistics import fmean
from typing import Any

import pytest

from eval.errors import CommandError
from eval.run import Run, read_samples
from eval.serve.arms import ARMS, Arm
from eval.serve.latency import cell_rows, summarize
from eval.serve.plan import SERVER, Cell, Plan
from eval.serve.runner import load_facts, measure, side_by_side, turned
from eval.serve.workload import Load
from eval.server import free_port
from eval.task import Request, TextChunk
from tests.eval.fake_endpoint import FakeEndpoint, serving

Endpoints = tuple[FakeEndpoint, FakeEndpoint]
WINDOW = "--chunkcache-window-requests"


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    """A server without our cache and one with it."""
    with ExitStack() as stack:
        stock = stack.enter_context(serving(FakeEndpoint()))
        yield stock, stack.enter_context(serving(FakeEndpoint(chunk_cache=True)))


def arms_of(endpoints: Endpoints) -> list[Arm]:
    """Both as arms that are already there."""
    named = zip(("stock-lpm", "ours"), endpoints, strict=True)
    return [replace(ARMS[name], url=endpoint.url) for name, endpoint in named]


def arm_at(endpoint: FakeEndpoint, name: str = "theirs") -> Arm:
    return Arm(name, "", route="chat", url=endpoint.url)


def singles(count: int) -> list[Request]:
    """Requests that have nothing to do with each other."""
    return [Request(f"t:{i}", f"q{i}", (TextChunk(f"c{i}", f"text {i}"),)) for i in range(count)]


CONVERSATION = [
    replace(request, conversation="c", reply=f"reply {i}", arrival_s=0.01 * i)
    for i, request in enumerate(singles(3))
]


def run_in(folder: Path, kind: type[Run] = Run) -> Run:
    return kind(folder, kind="serve", spec={}, summarize=lambda samples: {"n": len(samples)})


def take(folder: Path, plan: Plan, requests: Sequence[Request], **cell: Any) -> Run:
    """Measure one cell into a folder."""
    return take_cells(folder, plan, [Cell(cell.pop("label", {}), requests, **cell)])


def take_cells(folder: Path, plan: Plan, cells: Sequence[Cell]) -> Run:
    with run_in(folder) as run:
        measure(run, plan, cells)
    return run


def ks(*values: int) -> list[Cell]:
    return [Cell({"k": k}, singles(2)) for k in values]


def test_every_request_goes_through_every_arm_in_turned_blocks(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    """A busy minute of the machine has to hit all arms alike; an arm's clock goes on."""
    run = take(tmp_path, Plan(arms_of(endpoints), block=2), singles(8))
    order = [sample["arm"] for sample in run.samples]
    assert "".join(arm[0] for arm in order[::2]) == "soososso"
    assert Counter(order) == {"stock-lpm": 8, "ours": 8}
    assert [sample["block"] for sample in run.samples[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    for endpoint, arm in zip(endpoints, ("stock-lpm", "ours"), strict=True):
        asked = [question.split("\n\n")[-1] for question in endpoint.questions]
        assert asked == [f"q{i}" for i in range(8)]
        mine = [sample for sample in run.samples if sample["arm"] == arm]
        for early, late in itertools.pairwise(mine):
            assert early["due_s"] <= early["sent_s"] < early["done_s"] <= late["due_s"]


def test_samples_hold_times_counts_and_fates(endpoints: Endpoints, tmp_path: Path) -> None:
    run = take(tmp_path, Plan(arms_of(endpoints), warm_up=1), singles(2), label={"k": 5})
    by_key = {sample["key"]: sample for sample in run.samples}
    assert set(by_key) == {f"k=5/{arm}/t:{i}" for arm in ("stock-lpm", "ours") for i in (0, 1)}
    ours, stock = by_key["k=5/ours/t:1"], by_key["k=5/stock-lpm/t:1"]
    told = {"cell": {"k": 5}, "request": "t:1", "num_chunks": 1, "warm_up": False}
    assert told.items() <= ours.items()
    assert by_key["k=5/ours/t:0"]["warm_up"] is True
    metrics, num_prompt = dict(ours["metrics"]), ours["prompt_tokens"]
    times = [metrics.pop(name) for name in ("ttft_s", "itl_s", "e2e_s")]
    assert times[0] <= times[2]
    assert metrics.pop("hit_share") is not None
    # by fates, if it has any; what is recomputed is computed
    cached = (num_prompt - 3) / num_prompt
    assert metrics == {"recomputed_share": 1.0, "cached_share": cached, "prefill_tokens": 3}
    known = {"chunks_hit": 1, "fallbacks": [], "num_dropped": 1, "fused_hit": 0, "sampled": False}
    unknown = dict.fromkeys(("chunks_planned", "predicted_exact", "turns_reused"))
    assert ours["chunkcache"] == known | unknown
    assert stock["fates"] is None
    assert stock["metrics"]["prefill_tokens"] == stock["prompt_tokens"] - stock["cached_tokens"]


def test_tiers_are_told_once_the_storage_has_written_all(tmp_path: Path) -> None:
    """Or the next start would find less."""
    with serving(FakeEndpoint(chunk_cache=True, has_tiers=True, num_waiting=5)) as endpoint:
        plan = Plan([replace(ARMS["ours"], url=endpoint.url)])
        run = take(tmp_path, plan, singles(1))
    (told,) = plan.facts["tiers"]["ours"]
    assert told.pop("store")["max_entries"] == 100
    assert told == {"host": {"tokens": 7}, "storage": {"queue": 0}}
    assert run.samples[0]["chunkcache"]["loaded"] == 2
    (row,) = cell_rows(run.samples)
    assert row["loaded_share"] == 2 / run.samples[0]["prompt_tokens"]


def test_chunks_are_preprocessed_before_the_first_request(tmp_path: Path) -> None:
    """Behind each system message alone, then behind the nearest other one; of that arm alone."""
    texts = {"a": "red ball", "b": "red balloon", "c": "green refused", "again": "red ball"}
    chunks = [TextChunk(name, text) for name, text in texts.items()]
    asked = [
        Request("t:0", "q0", tuple(chunks[:2]), system="short"),
        Request("t:1", "q1", tuple(chunks[1:]), system="long"),
    ]
    ahead, others = FakeEndpoint(chunk_cache=True), FakeEndpoint(chunk_cache=True)
    with serving(ahead), serving(others):
        arms = [
            replace(ARMS[name], url=endpoint.url)
            for name, endpoint in (("fusionrag", ahead), ("fused", others))
        ]
        plan = Plan(arms)
        take(tmp_path, plan, asked)
    assert {body["path"] for body in others.received} == {"/rag/v1/chat/completions"}
    paths = [body["path"] for body in ahead.received]
    assert paths == ["/chunkcache/preprocess"] * 10 + ["/rag/v1/chat/completions"] * 2
    sent = [
        (
            body["messages"][0]["content"],
            body["chunk"]["text"],
            *(near["text"] for near in body["neighbors"]),
        )
        for body in ahead.received[:10]
    ]
    alone = [[("short", text) for text in ("red ball", "red balloon")]]
    alone.append([("long", text) for text in ("green refused", "red ball", "red balloon")])
    assert [sorted(sent[:2]), sorted(sent[4:7])] == alone
    behind = [("red ball", "red balloon"), ("red balloon", "red ball")]
    assert sorted(sent[2:4]) == [("short", *one) for one in behind]
    # of equals the first one
    assert sorted(sent[7:]) == [
        ("long", *one) for one in [("green refused", "red balloon"), *behind]
    ]
    told = plan.facts["preprocessed"]["fusionrag"]
    assert [one["alone"]["chunks"] for one in told] == [2, 2]
    assert [one["behind_neighbors"]["refused"] for one in told] == [0, 1]
    assert all(one["alone"]["seconds"] >= 0 for one in told)
    assert list(plan.facts["preprocessed"]) == ["fusionrag"]


def test_fix_overheads_of_moved_chunks_are_told(tmp_path: Path) -> None:
    """Cache-Craft's CFO of what was moved; an arm that moves nothing has no row."""
    with serving(FakeEndpoint(chunk_cache=True, cfo=(0.0, 0.5, 1.0))) as endpoint:
        arms = [replace(ARMS["fused"], url=endpoint.url), arm_at(endpoint)]
        run = take(tmp_path, Plan(arms, warm_up=1), singles(3))
    assert run.samples[0]["chunkcache"]["cfo"] == [0.0, 0.5, 1.0]
    results = summarize(run.samples, facts={}, against="theirs")
    (row,) = results["cfo"]
    assert (row["arm"], row["moved chunks"], row["p50"], row["mean"]) == ("fused", 6, 0.5, 0.5)
    assert results["tables"][-1]["rows"] == [row]


@pytest.mark.parametrize(("reports", "cached"), [(True, 0), (False, None)])
def test_nothing_cached_is_zero_only_where_the_server_counts(
    tmp_path: Path, reports: bool, cached: int | None
) -> None:
    """SGLang leaves a zero out; an arm that never finds anything needs its share."""
    with serving(FakeEndpoint(is_cold=True, cache_report=reports)) as endpoint:
        (sample,) = take(tmp_path, Plan([arm_at(endpoint)]), singles(1)).samples
    assert sample["cached_tokens"] == sample["metrics"].get("cached_share") == cached


def test_what_was_cached_is_known_by_fates_where_usage_does_not_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --enable-cache-report ours tells all the same, another is named."""
    silent = FakeEndpoint(is_cold=True, cache_report=False, chunk_cache=True)
    with serving(silent) as endpoint:
        arms = [replace(ARMS["ours"], url=endpoint.url), arm_at(endpoint)]
        asked = Request("t:0", "a question of so many tokens", (TextChunk("c", "text"),))
        ours, theirs = take(tmp_path, Plan(arms), [asked]).samples
    assert ours["metrics"]["cached_share"] == ours["fates"]["exact"] / ours["prompt_tokens"] > 0
    assert "cached_share" not in theirs["metrics"]
    told = capsys.readouterr().err
    assert "eval: theirs does not report cached tokens: start it with --enable-cache-report" in told
    assert told.count("--enable-cache-report") == 1


def test_closed_loop_keeps_so_many_in_flight(endpoints: Endpoints, tmp_path: Path) -> None:
    for endpoint in endpoints:
        endpoint.delay_s = 0.05
    take(tmp_path, Plan(arms_of(endpoints), block=0), singles(9), load=Load(clients=3))
    assert [endpoint.most_in_flight for endpoint in endpoints] == [3, 3]


def test_open_loop_measures_waiting_in_the_servers_queue(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    """Ten requests a second at a server that takes 0.2 s for one."""
    endpoints[0].delay_s, endpoints[0].serial = 0.2, True
    requests = [replace(request, arrival_s=0.1 * i) for i, request in enumerate(singles(6))]
    run = take(tmp_path, Plan(arms_of(endpoints)[:1], block=0), requests, load=Load("trace"))
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
    run = take(tmp_path, Plan(arms_of(endpoints), block=2, bystanders=2), singles(4))
    found = [sample for sample in run.samples if "gaps_s" in sample]
    stock, ours = ([s for s in found if s["arm"] == arm] for arm in ("stock-lpm", "ours"))
    assert [s["key"] for s in stock] == ["stock-lpm/bystanders:0", "stock-lpm/bystanders:2"]
    assert [s["block"] for s in ours] == [0, 1]
    # means, compared: on a busy machine two tokens arrive at once, and a block has idle moments
    slow, fast = ([fmean(each["gaps_s"]) for each in arm] for arm in (ours, stock))
    assert min(slow) > max(fast)
    for sample in ours:
        # two streams, for the block's time
        assert sum(sample["gaps_s"]) <= 2 * (sample["done_s"] - sample["due_s"]) + 0.1
    # two streams in each of two blocks
    assert [len(endpoint.aborted) for endpoint in endpoints] == [4, 4]


def test_each_block_has_its_peak(endpoints: Endpoints, tmp_path: Path) -> None:
    stock, ours = endpoints
    stock.delay_s = ours.delay_s = 0.4
    ours.has_tiers = stock.retracts = True
    plan = Plan(arms_of(endpoints), block=2, peaks=True)
    run = take(tmp_path, plan, singles(4), load=Load(clients=2))
    pools = {
        arm: [s["pool"] for s in run.samples if s["arm"] == arm and "pool" in s]
        for arm in ("stock-lpm", "ours")
    }
    assert pools["ours"] == 2 * [{"running": 2, "tokens": 14, "rows": 8, "retracted": 0}]
    for pool in pools["stock-lpm"]:
        assert (pool["running"], pool["tokens"], "rows" in pool) == (2, 18, False)
        assert pool["retracted"] > 2
    rows = {row["arm"]: row["pool"] for row in cell_rows(run.samples)}
    assert rows["ours"] == {"running": 2, "tokens": 14, "rows": 8, "retracted": 0}
    assert rows["stock-lpm"]["retracted"] == sum(pool["retracted"] for pool in pools["stock-lpm"])


def test_bystanders_first_gap_is_not_their_prefill(endpoints: Endpoints, tmp_path: Path) -> None:
    """A stream takes as long to begin as a prefill; a token without text is a token."""
    endpoints[0].prefill_s, endpoints[0].delay_s = 0.3, 0.2
    run = take(tmp_path, Plan(arms_of(endpoints)[:1], bystanders=1), singles(1))
    (sample,) = (sample for sample in run.samples if "gaps_s" in sample)
    assert max(sample["gaps_s"]) < 0.25


def test_bystander_that_is_refused_ends_the_run(tmp_path: Path) -> None:
    """Otherwise the streams that are left would be called all of them."""
    told = r"/generate, for --bystanders: ClientResponseError: 404"
    with (
        serving(FakeEndpoint(is_sglang=False)) as endpoint,
        pytest.raises(CommandError, match=told),
    ):
        take(tmp_path, Plan([arm_at(endpoint)], bystanders=1), singles(1))


@pytest.mark.parametrize("load", [Load(clients=3), Load("trace")])
def test_turn_waits_for_its_predecessor_and_shows_the_arms_own_answer(
    endpoints: Endpoints, tmp_path: Path, load: Load
) -> None:
    """A user reads the answer before he asks on; what a turn waited is told, not timed."""
    endpoints[0].delay_s = 0.1
    run = take(tmp_path, Plan(arms_of(endpoints), block=2), CONVERSATION, load=load)
    first, second, third = endpoints[0].received
    assert first["answered"] <= second["at"] < third["at"]
    shown = [message["content"] for message in third["messages"]]
    assert shown[::2] == [f"text {n}\n\nq{n}" for n in range(3)]
    assert shown[1::2] == ["an answer"] * 2
    ours = [message["content"] for message in endpoints[1].received[1]["messages"]]
    assert ours == ["q0", "an answer", "q1"]
    by_key = {sample["key"]: sample for sample in run.samples}
    assert by_key["stock-lpm/t:1"]["late_s"] >= 0.08
    due_s, done_s = by_key["stock-lpm/t:1"]["due_s"], by_key["stock-lpm/t:0"]["done_s"]
    assert due_s == pytest.approx(done_s)


def test_conversations_of_two_cells_have_different_ids(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    """Otherwise the second cell would find the first one's turns in our server's memory."""
    cells = [Cell({"k": k}, CONVERSATION) for k in (1, 2)]
    take_cells(tmp_path, Plan(arms_of(endpoints)), cells)
    ids = [body["conversation_id"] for body in endpoints[1].received]
    assert [len(set(ids[:3])), len(set(ids[3:])), len(set(ids))] == [1, 1, 2]


def test_failed_requests_are_kept_and_the_others_go_on(
    endpoints: Endpoints, tmp_path: Path
) -> None:
    """Also within a conversation: the next turn shows what was answered."""
    requests = [replace(CONVERSATION[0], question="refused"), CONVERSATION[1], *singles(5)[3:]]
    run = take(tmp_path, Plan(arms_of(endpoints)), requests)
    failed = [sample for sample in run.samples if "error" in sample]
    assert [(s["arm"], s["request"]) for s in failed] == [("stock-lpm", "t:0"), ("ours", "t:0")]
    assert all(sample["metrics"] == {} for sample in failed)
    assert len(run.samples) == 8
    assert len(endpoints[0].received[1]["messages"]) == 1


def test_cells_on_the_same_server_start_from_an_empty_cache(
    endpoints: Endpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But others may use a server that was already there, whose counts are not ours."""

    def emptied() -> list[tuple[int, int]]:
        return [(endpoint.num_flushed, endpoint.num_forgotten) for endpoint in endpoints]

    plan = Plan(arms_of(endpoints), flush=True)
    take_cells(tmp_path / "r", plan, ks(3, 5, 10))
    assert emptied() == [(3, 0), (3, 3)]
    assert plan.facts["servers"]["ours"]["flushed"] is True
    assert capsys.readouterr().err == ""
    take_cells(tmp_path / "s", replace(plan, flush=False), ks(3, 5))
    assert emptied() == [(3, 0), (3, 3)]
    assert "stock-lpm, ours: later cells reuse" in capsys.readouterr().err
    assert plan.facts["servers"]["ours"]["flushed"] is False


def test_facts_say_what_the_servers_are(endpoints: Endpoints, tmp_path: Path) -> None:
    plan = Plan([*arms_of(endpoints), Arm("gone", "", adapter="contextpilot", url="http://x")])
    plan = replace(plan, contextpilot_python=Path("/bin/false"))
    take(tmp_path, plan, singles(1))
    facts = load_facts(tmp_path)
    assert facts == plan.facts
    ours = {"model": "fake", "chunk_cache": True, "gate": [{"passed": True}]}
    assert ours.items() <= facts["servers"]["ours"].items()
    assert facts["servers"]["stock-lpm"]["chunk_cache"] is False
    assert "contextpilot" in facts["skipped"]["gone"]
    assert endpoints[0].received[0]["model"] == "fake-model"


def test_arms_that_cannot_be_measured_are_one_line(endpoints: Endpoints, tmp_path: Path) -> None:
    """A stock server, or another window, would be reported as our result."""
    nobody = Arm("a", "", route="chat", url=f"http://127.0.0.1:{free_port()}")
    for number, (arm, flags, told) in enumerate(
        (
            (replace(ARMS["ours"], url=endpoints[0].url), (), "does not run the chunk cache"),
            (nobody, (), "a: no server answers"),
            (arms_of(endpoints)[1], (WINDOW, "1"), "a running server cannot be given"),
        )
    ):
        with pytest.raises(CommandError, match=told) as error:
            take(tmp_path / f"{number}", Plan([arm]), singles(1), flags=flags)
        assert "\n" not in str(error.value)


def test_server_that_dies_ends_the_run_with_what_there_is(tmp_path: Path) -> None:
    """The same command goes on; what the arm had served is sent again, unmeasured."""
    requests = [*CONVERSATION, *singles(8)[3:]]
    with serving(FakeEndpoint()) as stays, serving(FakeEndpoint()) as dies:
        plan = Plan([arm_at(stays, "stays"), arm_at(dies, "dies")], block=2)

        class Dying(Run):
            def add_all(self, samples: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
                super().add_all(samples)
                if "dies/t:1" in self:
                    dies.is_down = True

        with (
            pytest.raises(CommandError, match="dies: no server answers"),
            run_in(tmp_path, Dying) as run,
        ):
            measure(run, plan, [Cell({}, requests)])
        keys = [sample["key"] for sample in run.samples]
        assert keys[:4] == ["stays/t:0", "stays/t:1", "dies/t:0", "dies/t:1"]
        assert not [sample for sample in run.samples if "error" in sample]
        dies.is_down = False
        num_before = len(dies.received)
        again = take(tmp_path, replace(plan, facts=load_facts(tmp_path)), requests)
    whole = {f"{arm}/t:{i}" for arm in ("stays", "dies") for i in range(8)}
    assert {sample["key"] for sample in again.samples} == whole
    questions = [question.split("\n\n")[-1] for question in dies.questions[num_before:]]
    assert questions[:2] == ["q0", "q1"], "sent again"
    assert len(dies.received[num_before + 2]["messages"]) == 5, "the conversation goes on"
    assert len(questions) == 8
    mine = [sample["due_s"] for sample in again.samples if sample["arm"] == "dies"]
    assert mine == sorted(mine)
    assert load_facts(tmp_path)["resumed_at"][0]["samples"] == len(run.samples)


def test_block_that_was_kept_in_part_is_taken_again(endpoints: Endpoints, tmp_path: Path) -> None:
    """Killed while it is written: what is missing would be missing for good."""
    requests, plan = singles(6), Plan(arms_of(endpoints), block=3)
    take(tmp_path, plan, requests)
    lines = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    # 7: one of three of a second block
    (tmp_path / "samples.jsonl").write_text("".join(lines[:7]) + lines[7][:20])
    record = json.loads((tmp_path / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps(record | {"complete": False}))
    again, before = take(tmp_path, plan, requests).samples, [json.loads(line) for line in lines]
    assert [sample["key"] for sample in again] == [sample["key"] for sample in before]
    assert (again[:6], again[6] != before[6]) == (before[:6], True)
    assert read_samples(tmp_path) == again


def test_turned_puts_every_arm_in_every_place_equally_often() -> None:
    for count in (1, 2, 3, 4):
        orders = [turned(range(count), number) for number in range(2 * count)]
        places = Counter((arm, place) for order in orders for place, arm in enumerate(order))
        assert set(places.values()) == {2}


def test_cells_stand_side_by_side_where_they_share_no_server() -> None:
    """Windows of our server can take turns; rates, or stock's one server, cannot."""
    ours, stock, craft = ARMS["ours"], ARMS["stock-lpm"], ARMS["craft"]
    windows = [Cell({"window": n}, (), flags=(WINDOW, str(n))) for n in (10, 100, 1000)]
    again = replace(windows[0], flags=("x",))
    for cells, arms, sizes in (
        (windows, [ours], [3]),
        ([*windows, again], [ours, craft], [3, 1]),
        (windows, [ours, stock], [1, 1, 1]),
        ([Cell({"rate": n}, ()) for n in (1, 2)], [ours], [1, 1]),
        ([Cell({SERVER: n}, ()) for n in (1, 2)], [ours, stock], [2]),
    ):
        assert [len(group) for group in side_by_side(cells, arms)] == sizes


@pytest.mark.parametrize(
    ("asked", "at_most", "sent"),
    [(None, None, 8), (5, None, 5), (None, 3, 3), (50, 3, 3), (2, 3, 2)],
)
def test_answers_are_as_long_as_the_trace_says_but_no_longer_than_the_user(
    endpoints: Endpoints, tmp_path: Path, asked: int | None, at_most: int | None, sent: int
) -> None:
    """Full-length answers of a production trace take hours on a small machine."""
    requests = [replace(request, max_new_tokens=asked) for request in singles(1)]
    take(tmp_path, Plan(arms_of(endpoints), max_new_tokens=at_most), requests)
    assert [body["max_tokens"] for body in endpoints[0].received] == [sent]
