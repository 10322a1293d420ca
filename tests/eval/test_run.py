"""A run's folder: every sample is kept, an interrupted run goes on,
and its record is valid at every moment."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.errors import CommandError
from eval.record import model_sha256, portable
from eval.run import Run, read_record, read_samples
from eval.task import Request, TextChunk, requests_sha256


def total(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"total": sum(sample["value"] for sample in samples)}


def interrupt(run: Run, error: type[BaseException]) -> None:
    """One sample, then the end."""
    with pytest.raises(error), run:  # noqa: PT012  both lines belong to the run that ends
        run.add("a", {"value": 1})
        raise error


def open_run(folder: Path, **spec: Any) -> Run:
    return Run(folder, kind="serve", spec=spec, summarize=total)


def test_complete_run_has_its_samples_and_figures(tmp_path: Path) -> None:
    """What a reader of the folder finds."""
    with open_run(tmp_path / "run", seed=3) as run:
        for value in (1, 2):
            run.add(f"sample {value}", {"value": value})
    record = read_record(tmp_path / "run")
    assert (record["kind"], record["complete"], record["spec"], record["results"]) == (
        "serve",
        True,
        {"seed": 3},
        {"total": 3},
    )
    assert read_samples(tmp_path / "run") == [
        {"key": "sample 1", "value": 1},
        {"key": "sample 2", "value": 2},
    ]


def test_interrupted_run_has_a_valid_record_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C costs the sample in the making and no other."""
    interrupt(open_run(tmp_path / "run"), KeyboardInterrupt)
    record = read_record(tmp_path / "run")
    assert (record["complete"], record["results"]) == (False, {"total": 1})
    assert "1 samples are in" in capsys.readouterr().err
    with open_run(tmp_path / "run") as run:
        assert "a" in run
        assert "b" not in run
        run.add("b", {"value": 2})
    assert read_record(tmp_path / "run")["results"] == {"total": 3}


def test_killed_run_loses_only_the_line_in_the_making(tmp_path: Path) -> None:
    """kill -9 writes no record and may cut a line: the next run must not append to it."""
    interrupt(open_run(tmp_path / "run"), RuntimeError)
    with (tmp_path / "run" / "samples.jsonl").open("a") as lines:
        lines.write('{"key": "b", "val')
    with open_run(tmp_path / "run") as run:
        assert "b" not in run
        run.add("b", {"value": 2})
    assert [sample["key"] for sample in read_samples(tmp_path / "run")] == ["a", "b"]


def test_record_is_there_before_the_first_sample(tmp_path: Path) -> None:
    """A run that is killed at once can be continued, too."""
    run = open_run(tmp_path / "run")
    run.__enter__()
    assert read_record(tmp_path / "run")["complete"] is False


def test_other_settings_do_not_continue_a_run(tmp_path: Path) -> None:
    """Samples of two settings in one record would be no record."""
    interrupt(open_run(tmp_path / "run", seed=1, rate=2), KeyboardInterrupt)
    with (
        pytest.raises(CommandError, match="other settings: seed"),
        open_run(tmp_path / "run", seed=2, rate=2),
    ):
        pass
    with (
        pytest.raises(CommandError, match="the command"),
        Run(tmp_path / "run", kind="quality", spec={"seed": 1, "rate": 2}, summarize=total),
    ):
        pass


def test_run_without_samples_is_begun_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error in the first command must not need another folder,
    nor be told how to go on."""
    with pytest.raises(CommandError), open_run(tmp_path / "run", rate=1):
        raise CommandError("no server answers")
    assert capsys.readouterr().err == ""
    with open_run(tmp_path / "run", rate=2):
        pass
    assert read_record(tmp_path / "run")["spec"] == {"rate": 2}


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CommandError, match=r"file/run cannot be written: .*--out") as error:
        open_run(tmp_path / "file" / "run").__enter__()
    assert "\n" not in str(error.value)


def test_complete_run_is_never_touched(tmp_path: Path) -> None:
    """Records are added, never edited."""
    with open_run(tmp_path / "run"):
        pass
    before = (tmp_path / "run" / "record.json").read_bytes()
    with pytest.raises(CommandError, match="complete"), open_run(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "record.json").read_bytes() == before


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_somebody_elses_folder_is_refused(tmp_path: Path, kind: str) -> None:
    """`--out .` must not scatter files among a user's own."""
    path = tmp_path / "thing"
    if kind == "folder":
        path.mkdir()
        (path / "thesis.txt").write_text("mine")
    else:
        path.write_text("mine")
    with pytest.raises(CommandError, match="new or empty"), open_run(path):
        pass


def test_same_key_twice_is_a_bug(tmp_path: Path) -> None:
    """Otherwise a sample would count twice."""
    with open_run(tmp_path / "run") as run:
        run.add("a", {"value": 1})
        with pytest.raises(ValueError, match="there already"):
            run.add("a", {"value": 1})


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
    spec = {
        "data": Path("/home/me/data/squad"),
        "model": "/models/x",
        "hub": "rajpurkar/squad",
        "out": Path("/x"),
        "n": (1, "../y/z"),
    }
    assert portable(spec) == {
        "data": "squad",
        "model": "x",
        "hub": "rajpurkar/squad",
        "n": [1, "z"],
    }


def test_interrupted_command_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As shells expect, and without a traceback."""

    def interrupted(argv: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("eval.replay.command.main", interrupted)
    assert main(["replay"]) == 130
    assert capsys.readouterr().err == "eval replay: interrupted\n"


def test_missing_package_is_one_line_and_a_missing_module_of_ours_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's python has no aiohttp; a traceback would not say where one is that has."""

    def needs(name: str) -> Callable[[Sequence[str]], int]:
        def main(argv: Sequence[str]) -> int:
            raise ModuleNotFoundError(name=name)

        return main

    monkeypatch.setattr("eval.replay.command.main", needs("aiohttp.web"))
    assert main(["replay"]) == 2
    told = "eval replay needs aiohttp: run it with .venv/bin/python (launch/setup.sh makes it)\n"
    assert capsys.readouterr().err == told
    monkeypatch.setattr("eval.replay.command.main", needs("eval.misspelt"))
    with pytest.raises(ModuleNotFoundError):
        main(["replay"])


def test_samples_that_belong_together_are_kept_together(tmp_path: Path) -> None:
    """A block counts whole or not at all: neither a key that is there nor a number that is none
    leaves half of it."""
    with open_run(tmp_path / "run") as run:
        run.add_all([("a", {"value": 1}), ("b", {"value": 2})])
        for key, value in (("a", 3.0), ("c", 3.0), ("d", math.nan)):
            with pytest.raises(ValueError, match=r"there already|not JSON compliant"):
                run.add_all([("c", {"value": 3}), (key, {"value": value})])
        assert [sample["key"] for sample in run.samples] == ["a", "b"]
        assert "c" not in run
    assert [sample["key"] for sample in read_samples(tmp_path / "run")] == ["a", "b"]


def test_dropped_samples_can_be_taken_again(tmp_path: Path) -> None:
    """The file holds what the run holds; keys that are not there are none of its business."""
    with open_run(tmp_path / "run") as run:
        run.add_all([("a", {"value": 1}), ("b", {"value": 2}), ("c", {"value": 3})])
        run.drop({"b", "x"})
        assert "b" not in run
        assert read_samples(tmp_path / "run") == run.samples
        run.add("b", {"value": 4})
    assert read_record(tmp_path / "run")["results"] == {"total": 8}


def test_whole_samples_are_not_written_again(tmp_path: Path) -> None:
    """A second interruption while they are would lose them."""
    interrupt(open_run(tmp_path / "run"), RuntimeError)
    samples = tmp_path / "run" / "samples.jsonl"
    before = samples.stat()
    with open_run(tmp_path / "run"):
        pass
    assert (samples.stat().st_ino, samples.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_cut_sample_is_removed_without_a_moment_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed again just then, the old file is still there."""
    interrupt(open_run(tmp_path / "run"), RuntimeError)
    with (tmp_path / "run" / "samples.jsonl").open("a") as lines:
        lines.write('{"key": "b", "val')
    before = (tmp_path / "run" / "samples.jsonl").read_text()

    def killed(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        open_run(tmp_path / "run").__enter__()
    assert (tmp_path / "run" / "samples.jsonl").read_text() == before


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
    for sha, dirty in (
        ("one", False),
        ("one", False),
        ("two", True),
        ("three", False),
        ("one", False),
    ):
        monkeypatch.setattr(
            "eval.run.git_state", lambda sha=sha, dirty=dirty: {"sha": sha, "dirty": dirty}
        )
        run = open_run(tmp_path / "run").__enter__()
        if not run.samples:
            run.add("a", {"value": 1})
        # and then it is killed
    assert read_record(tmp_path / "run")["git"] == {
        "sha": "one",
        "dirty": True,
        "resumed_with": ["two", "three"],
    }


def test_commit_is_that_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours later another may be checked out, while the code that runs is the old one."""
    monkeypatch.setattr("eval.run.git_state", lambda: {"sha": "old", "dirty": False})
    with open_run(tmp_path / "run"):
        monkeypatch.setattr("eval.run.git_state", lambda: {"sha": "new", "dirty": True})
    assert read_record(tmp_path / "run")["git"] == {"sha": "old", "dirty": False}


def test_model_is_known_by_its_config(tmp_path: Path) -> None:
    """Of a folder only the name is recorded, and another model may have the same."""
    for name, text in (("a", "{}"), ("b", "{ }")):
        (tmp_path / name / "m").mkdir(parents=True)
        (tmp_path / name / "m" / "config.json").write_text(text)
    digests = {model_sha256(str(tmp_path / name / "m")) for name in "ab"} | {
        model_sha256("bundled")
    }
    assert len(digests - {None}) == 3
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


def test_samples_are_json_lines(tmp_path: Path) -> None:
    """Anybody can read them without us."""
    with open_run(tmp_path / "run") as run:
        run.add("ä ", {"value": 1})
    lines = (tmp_path / "run" / "samples.jsonl").read_text().split("\n")
    assert [json.loads(line)["value"] for line in lines if line] == [1]
