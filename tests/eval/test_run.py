"""A run's folder: every sample is kept, an interrupted run goes on,
and its record is valid at every moment."""

import json
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from eval.__main__ import main
from eval.errors import CommandError
from eval.record import model_sha256, portable
from eval.run import Run, read_record, read_samples
from eval.task import Request, TextChunk, requests_sha256


def total(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"total": sum(sample["value"] for sample in samples)}


def open_run(folder: Path, kind: str = "serve", **spec: Any) -> Run:
    return Run(folder, kind=kind, spec=spec, summarize=total)


def interrupt(run: Run, error: type[BaseException]) -> None:
    """One sample, then the end."""
    with pytest.raises(error), run:  # noqa: PT012  both lines belong to the run that ends
        run.add("a", {"value": 1})
        raise error


def cut_line(folder: Path) -> None:
    """As kill -9 leaves it: no record is written, and a line is cut."""
    interrupt(open_run(folder), RuntimeError)
    with (folder / "samples.jsonl").open("a") as lines:
        lines.write('{"key": "b", "val')


def keys(folder: Path) -> list[str]:
    return [sample["key"] for sample in read_samples(folder)]


def test_complete_run_has_its_samples_and_is_never_touched(tmp_path: Path) -> None:
    """Records are added, never edited. Samples are JSON lines, which anybody can read."""
    with open_run(tmp_path, seed=3) as run:
        assert read_record(tmp_path)["complete"] is False, "a run that is killed at once goes on"
        for value in (1, 2):
            run.add(f"ä {value}", {"value": value})
    record, before = read_record(tmp_path), (tmp_path / "record.json").read_bytes()
    found = {"kind": "serve", "complete": True, "spec": {"seed": 3}, "results": {"total": 3}}
    assert found.items() <= record.items()
    expected = [{"key": f"ä {value}", "value": value} for value in (1, 2)]
    lines = (tmp_path / "samples.jsonl").read_text().split("\n")[:-1]
    assert read_samples(tmp_path) == [json.loads(line) for line in lines] == expected
    with pytest.raises(CommandError, match="complete"), open_run(tmp_path, seed=3):
        pass
    assert (tmp_path / "record.json").read_bytes() == before


def test_interrupted_run_has_a_valid_record_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C costs the sample in the making and no other."""
    interrupt(open_run(tmp_path), KeyboardInterrupt)
    record = read_record(tmp_path)
    assert (record["complete"], record["results"]) == (False, {"total": 1})
    assert "1 samples are in" in capsys.readouterr().err
    with open_run(tmp_path) as run:
        assert ("a" in run, "b" in run) == (True, False)
        run.add("b", {"value": 2})
    assert read_record(tmp_path)["results"] == {"total": 3}


def test_killed_run_loses_only_the_line_in_the_making(tmp_path: Path) -> None:
    """The next run must not append to it."""
    cut_line(tmp_path)
    with open_run(tmp_path) as run:
        assert "b" not in run
        run.add("b", {"value": 2})
    assert keys(tmp_path) == ["a", "b"]


def test_cut_sample_is_removed_without_a_moment_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed again just then, the old file is still there."""
    cut_line(tmp_path)
    before = (tmp_path / "samples.jsonl").read_text()

    def killed(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        open_run(tmp_path).__enter__()
    assert (tmp_path / "samples.jsonl").read_text() == before


def test_whole_samples_are_not_written_again(tmp_path: Path) -> None:
    """A second interruption while they are would lose them."""
    interrupt(open_run(tmp_path), RuntimeError)
    before = (tmp_path / "samples.jsonl").stat()
    with open_run(tmp_path):
        pass
    after = (tmp_path / "samples.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_other_settings_do_not_continue_a_run(tmp_path: Path) -> None:
    """Samples of two settings in one record would be no record."""
    interrupt(open_run(tmp_path, seed=1, rate=2), KeyboardInterrupt)
    with pytest.raises(CommandError, match="other settings: seed"):
        open_run(tmp_path, seed=2, rate=2).__enter__()
    with pytest.raises(CommandError, match="the command"):
        open_run(tmp_path, "quality", seed=1, rate=2).__enter__()


def test_run_without_samples_is_begun_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error in the first command must not need another folder."""
    with pytest.raises(CommandError), open_run(tmp_path, rate=1):
        raise CommandError("no server answers")
    assert capsys.readouterr().err == ""
    with open_run(tmp_path, rate=2):
        pass
    assert read_record(tmp_path)["spec"] == {"rate": 2}


@pytest.mark.parametrize(
    ("path", "told"),
    [("mine.txt/run", r"mine.txt/run cannot be written: .*--out"), (".", "new or empty")],
)
def test_folder_that_is_none_or_somebody_elses_is_one_line(
    tmp_path: Path, path: str, told: str
) -> None:
    """`--out .` must not scatter files among a user's own."""
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CommandError, match=told) as error:
        open_run(tmp_path / path).__enter__()
    assert "\n" not in str(error.value)
    with pytest.raises(CommandError, match="new or empty"):
        open_run(tmp_path / "mine.txt").__enter__()


@pytest.mark.parametrize("text", ["{", "[]", '{"results": {}}'])
def test_broken_and_older_records_are_named(tmp_path: Path, text: str) -> None:
    """One line, not a traceback, from report and compare."""
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(CommandError, match=r"record\.json"):
        read_record(tmp_path)


def test_missing_record_and_broken_samples_are_named(tmp_path: Path) -> None:
    """With the line, since a long run's file is no fun to search."""
    with pytest.raises(CommandError, match="no record"):
        read_record(tmp_path)
    (tmp_path / "samples.jsonl").write_text('{"key": "a"}\nnonsense\n')
    with pytest.raises(CommandError, match="line 2"):
        read_samples(tmp_path)


def test_spec_keeps_no_path_of_this_machine() -> None:
    """Records are published; hub names are not paths."""
    hub = {"hub": "rajpurkar/squad"}
    spec = {"data": Path("/home/me/data/squad"), "model": "/models/x", "out": Path("/x"), **hub}
    found = portable({**spec, "n": (1, "../y/z")})
    assert found == {"data": "squad", "model": "x", "n": [1, "z"], **hub}


def test_ends_of_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """130 for an interruption; one line for a missing package, but ours is a bug."""

    def end_with(error: BaseException) -> None:
        def command(argv: Sequence[str]) -> NoReturn:
            raise error

        monkeypatch.setattr("eval.replay.command.main", command)

    end_with(KeyboardInterrupt())
    assert main(["replay"]) == 130
    assert capsys.readouterr().err == "eval replay: interrupted\n"
    end_with(ModuleNotFoundError(name="aiohttp.web"))
    assert main(["replay"]) == 2
    told = "eval replay needs aiohttp: run it with .venv/bin/python (launch/setup.sh makes it)\n"
    assert capsys.readouterr().err == told
    end_with(ModuleNotFoundError(name="eval.misspelt"))
    with pytest.raises(ModuleNotFoundError):
        main(["replay"])


def test_samples_that_belong_together_are_kept_together(tmp_path: Path) -> None:
    """A block counts whole or not at all."""
    with open_run(tmp_path) as run:
        run.add_all([("a", {"value": 1}), ("b", {"value": 2})])
        for key, value in (("a", 3.0), ("c", 3.0), ("d", math.nan)):
            with pytest.raises(ValueError, match=r"there already|not JSON compliant"):
                run.add_all([("c", {"value": 3}), (key, {"value": value})])
        assert [sample["key"] for sample in run.samples] == ["a", "b"]
        assert "c" not in run
    assert keys(tmp_path) == ["a", "b"]


def test_dropped_samples_can_be_taken_again(tmp_path: Path) -> None:
    """The file holds what the run holds; keys that are not there are none of its business."""
    with open_run(tmp_path) as run:
        run.add_all([("a", {"value": 1}), ("b", {"value": 2}), ("c", {"value": 3})])
        run.drop({"b", "x"})
        assert "b" not in run
        assert read_samples(tmp_path) == run.samples
        run.add("b", {"value": 4})
    assert read_record(tmp_path)["results"] == {"total": 8}


def test_record_holds_no_number_that_json_has_not(tmp_path: Path) -> None:
    """Other programs could not read it; a setting is named before anything is done."""
    run = Run(tmp_path / "run", kind="serve", spec={}, summarize=lambda samples: {"mean": math.nan})
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.__enter__()
    with pytest.raises(CommandError, match="timeout: expected a finite number, got inf"):
        open_run(tmp_path / "other", seed=1, timeout=math.inf).__enter__()
    assert not (tmp_path / "other").exists()


def test_commits_of_a_run_that_went_on_are_all_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`git` is the first one's: its samples were not taken with the last one."""
    for sha in ("one", "one", "two", "three", "one"):
        state = {"sha": sha, "dirty": sha == "two"}
        monkeypatch.setattr("eval.run.git_state", lambda state=state: state)
        run = open_run(tmp_path).__enter__()
        if not run.samples:
            run.add("a", {"value": 1})
        # and then it is killed
    found = {"sha": "one", "dirty": True, "resumed_with": ["two", "three"]}
    assert read_record(tmp_path)["git"] == found


def test_commit_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours later another may be checked out, while the code that runs is the old one."""
    monkeypatch.setattr("eval.run.git_state", lambda: {"sha": "old", "dirty": False})
    with open_run(tmp_path):
        monkeypatch.setattr("eval.run.git_state", lambda: {"sha": "new", "dirty": True})
    assert read_record(tmp_path)["git"] == {"sha": "old", "dirty": False}


def test_model_is_known_by_its_config(tmp_path: Path) -> None:
    """Of a folder only the name is recorded, and another model may have the same."""
    for name, text in (("a", "{}"), ("b", "{ }")):
        (tmp_path / name / "m").mkdir(parents=True)
        (tmp_path / name / "m" / "config.json").write_text(text)
    models = ("bundled", *(str(tmp_path / name / "m") for name in "ab"))
    assert len({model_sha256(model) for model in models} - {None}) == 3
    assert model_sha256("nobody/nothing") is None


def test_requests_digest_knows_every_field_and_the_order() -> None:
    """A run must not go on with another data set of the same name."""
    first, second = Request("t:1", "who?", (TextChunk("a", "text"),)), Request("t:2", "why?")
    digest = requests_sha256([first, second])
    assert digest == requests_sha256(iter([replace(first), second]))
    others: dict[str, Any] = {
        **dict.fromkeys(("id", "question", "conversation", "reply", "system"), "other"),
        **dict.fromkeys(("answers", "gold_ids"), ("other",)),
        "chunks": (TextChunk("a", "texts"),),
        "arrival_s": 1.5,
        "max_new_tokens": 3,
    }
    assert others.keys() == {field.name for field in fields(Request)}
    changed = [[replace(first, **{name: value}), second] for name, value in others.items()]
    digests = {requests_sha256(requests) for requests in [*changed, [second, first], [first]]}
    assert len(digests - {digest}) == len(changed) + 2
