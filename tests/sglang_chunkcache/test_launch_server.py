"""The launcher's flags: what is ours, what is SGLang's, what is refused."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from retrieval.errors import CorruptIndexError
from sglang_chunkcache import config, launch_server
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.front import startup
from sglang_chunkcache.launch_server import CPU_FLAGS, found_models, server_flags

Capture = pytest.CaptureFixture[str]
BUNDLED = ["--model-path", "bundled"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


# SGLang's flags


@pytest.mark.parametrize("given", [BUNDLED, ["--model-path=bundled"], ["--model", "bundled"]])
def test_bundled_model_becomes_a_path(given: list[str]) -> None:
    """In every spelling, with other flags around it, and for the tokenizer, too."""
    flags = ["--port", "1", *given, "--tp", "1", "--tokenizer-path=bundled"]
    model, path = given[0].split("=")[0], str(model_dir())
    found = ["--port", "1", model, path, "--tp", "1", "--tokenizer-path", path]
    before = list(flags)
    assert found_models(flags) == found
    assert flags == before, "the caller's list is the caller's"


@pytest.mark.parametrize("other", ["--model-path-extra", "--model-paths=bundled"])
def test_flag_that_only_begins_like_model_path_is_left_alone(other: str, tmp_path: Path) -> None:
    given = [other, "--model-path", str(tmp_path)]
    assert found_models(given) == given


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("given", [["--max-total-tokens", "9"], ["--max-total-tokens=9"]], ids=repr)
def test_cpu_flags_are_added_and_do_not_overrule_the_users(given: list[str]) -> None:
    """A machine without GPU needs them all. In both spellings."""
    flags = server_flags(given)
    assert flags[: len(given)] == given
    assert "65536" not in flags
    for flag, value in CPU_FLAGS.items():
        if flag != "--max-total-tokens":
            assert value is None or flags[flags.index(flag) + 1] == value


# The start


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What main() would start; the environment is put back."""
    started: list[Any] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(
        launch_server, "_run", lambda flags, **kwargs: started.append((flags, kwargs))
    )
    # it would hide the tests' own
    monkeypatch.setattr("sglang_chunkcache.quiet.hide", lambda settings: None)
    return started


def settings_of(*flags: str) -> config.ChunkCacheConfig:
    """What main() hands over."""
    launch_server.main([*BUNDLED, *flags])
    settings = config.from_env(os.environ)
    assert settings is not None
    return settings


def test_main_hands_the_configuration_over(run: list[Any]) -> None:
    """Our flags are ours, the rest is SGLang's."""
    settings = settings_of("--chunkcache-order", "frequency", "--port", "1")
    assert (settings.order, bool(settings.secret)) == ("frequency", True)
    assert run[0][0][:4] == ["--model-path", str(model_dir()), "--port", "1"]


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("flags", "log"),
    [([], "brief"), (["--log-level", "info"], "all"), (["--log-level=debug"], "all")],
)
def test_log_level_of_sglangs_shows_everything(flags: list[str], log: str) -> None:
    """Whoever asks for a level wants to see its lines."""
    assert settings_of(*flags).log == log


def test_main_stock_leaves_no_configuration(run: list[Any]) -> None:
    """An inherited configuration would switch our endpoints on."""
    os.environ[config.ENV_VAR] = "{}"
    launch_server.main([*BUNDLED, "--stock"])
    assert config.ENV_VAR not in os.environ
    assert run[0][1]["stock"] is True


def test_main_opens_the_index_first(
    run: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """By either name; `--stock` has no use for one. A bad one is told before anything is loaded."""

    def open_retriever(settings: Any) -> str:
        if settings.index == "bad":
            raise CorruptIndexError("bad: a checksum differs")
        return f"retriever of {settings.index}"

    monkeypatch.setattr(startup, "open_retriever", open_retriever)
    monkeypatch.setattr(startup, "open_reranker", lambda settings: f"{settings.reranker} opened")
    for flags in (["--index", "i"], ["--chunkcache-index", "i"], ["--index", "i", "--stock"], []):
        launch_server.main([*BUNDLED, *flags])
    launch_server.main([*BUNDLED, "--index", "i", "--reranker", "r"])
    rerankers = [kwargs["reranker"] for _, kwargs in run]
    assert (rerankers[:-1], run.pop()[1]["reranker"]) == ([None] * 4, "r opened")
    found = [kwargs["retriever"] for _, kwargs in run]
    assert found == ["retriever of i", "retriever of i", None, None]
    with pytest.raises(SystemExit, match="2"):
        launch_server.main([*BUNDLED, "--index", "bad"])
    assert capsys.readouterr().err.endswith("error: --index: bad: a checksum differs\n")
    assert len(run) == 4


def test_without_an_index_nothing_of_retrieval_is_loaded() -> None:
    """faiss is no dependency of a server that does not search."""
    code = (
        "import sys; from sglang_chunkcache import launch_server; from sglang_chunkcache.front"
        " import startup;sys.exit(any(name in sys.modules for name in ('faiss', 'tantivy',"
        " 'retrieval.retriever')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


STORAGE = "--chunkcache-storage-backend"
FUSED = ["--reuse", "fused"]
STORED = [*BUNDLED, *FUSED, STORAGE]


@pytest.mark.usefixtures("run", "gpu")
def test_missing_compiler_is_told_by_name_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Only where fused mode compiles. What is in CUDA_HOME, or beside the interpreter, is found."""
    for name in ("CUDA_PATH", "FLASHINFER_NVCC", "CXX"):
        os.environ.pop(name, None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    os.environ.update(PATH=str(tmp_path / "none"), CUDA_HOME=str(tmp_path / "cuda"))

    def told(*flags: str) -> str:
        launch_server.main([*BUNDLED, *flags])
        return capsys.readouterr().err

    def put(path: str) -> None:
        tool = tmp_path / path
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.touch(mode=0o755)

    assert "not found: nvcc, ninja, a C++ compiler." in told("--reuse", "fused")
    assert not told() + told("--reuse", "fused", "--recompute-attention", "masked")
    for path in ("cuda/bin/nvcc", "none/c++"):
        put(path)
    assert "not found: ninja." in told("--reuse", "fused", "--recompute-attention", "sparse")
    put("venv/ninja")
    assert not told("--reuse", "fused")


SPARSE = [*BUNDLED, "--recompute-attention", "sparse"]


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--model-path is missing: a model's folder"),
        (["--model-path", "./nosuch/model"], "'./nosuch/model': no such file or folder"),
        (["--stock", "--model-path=./nosuch"], "'./nosuch': no such file or folder"),
        ([*BUNDLED, "--chunkcache-window-requests", "0"], "--chunkcache-window-requests"),
        ([*BUNDLED, "--encoder", "x"], "--encoder needs --index"),
        ([*BUNDLED, "--reranker", "x"], "--reranker needs --index"),
        ([*STORED, "hf3fs"], f"{STORAGE} hf3fs is not supported, only file and dynamic"),
        ([*BUNDLED, STORAGE, "file", "--chunkcache-host-mib", "0"], "needs --chunkcache-host-mib"),
        ([*STORED, "dynamic"], f"{STORAGE} dynamic needs --chunkcache-storage-mib"),
        ([*BUNDLED, "--chunkcache-storage-mib", "5"], f"{STORAGE} is missing"),
        ([*BUNDLED, f"{STORAGE}-extra-config", "{}"], f"{STORAGE} is missing"),
        ([*STORED, "file", f"{STORAGE}-extra-config", "{"], f"{STORAGE}-extra-config: "),
        ([*SPARSE, *FUSED], "--recompute-attention sparse: there is no CUDA device"),
        (SPARSE, "--recompute-attention sparse needs --reuse fused"),
        ([*STORED, "file"], "are both set"),
        ([*BUNDLED, "--chunkcache-ordr", "tree"], "did you mean --chunkcache-order?"),
        ([*BUNDLED, "--chunkcache-selectors", "no.module"], "--chunkcache-selectors no.module: "),
        ([*BUNDLED, *FUSED, "--chunkcache-selector", "h2o"], "--chunkcache-selector must be one"),
    ],
)
def test_main_mistake_exits_with_2(
    flags: list[str], message: str, run: list[Any], capsys: Capture
) -> None:
    """With one line that names the flag, before anything is loaded. Two secrets are set."""
    for name in ("SGLANG_CHUNKCACHE_STORAGE_SECRET", "SGLANG_CHUNKCACHE_STORAGE_SECRET_FILE"):
        os.environ[name] = "x"
    with pytest.raises(SystemExit, match="2"):
        launch_server.main(flags)
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: python -m sglang_chunkcache.launch_server --model-path M [flags]"
    assert message in error
    assert not run


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        (["--prot", "1"], "did you mean --port?"),
        (["--host-mib", "1"], "did you mean --chunkcache-host-mib?"),
        (["--tp-size", "x"], "--tensor-parallel-size: invalid int value: 'x'"),
    ],
)
def test_mistake_in_sglangs_flags_is_one_line(flags: list[str], end: str) -> None:
    """SGLang's own comes below 400 lines of usage, and names no flag."""
    pytest.importorskip("sglang")

    def fail(error: str) -> NoReturn:
        raise ValueError(error)

    with pytest.raises(ValueError, match=re.escape(end) + "$"):
        launch_server.prepare([*BUNDLED, *flags], stock=False, fail=fail)


@pytest.mark.parametrize(
    ("device", "flags"),
    [
        ("cpu", [*STORED, "file"]),
        ("cpu", [*BUNDLED, *FUSED]),
        ("cpu", [*SPARSE, *FUSED, "--stock"]),
        ("gpu", [*SPARSE, *FUSED]),
    ],
)
def test_main_starts(
    device: str, flags: list[str], run: list[Any], request: pytest.FixtureRequest
) -> None:
    """By default the pass takes what there is."""
    request.getfixturevalue(device)
    launch_server.main(flags)
    assert run


@pytest.mark.parametrize(
    ("num_ranks", "cores", "given", "bound"),
    [
        (2, {0, 1, 2, 3}, None, "0,1|2,3"),
        (3, {5, 7}, None, "5|7|5"),
        (1, {5, 7}, None, None),
        (2, {5, 7}, "x", "x"),
    ],
)
def test_cpu_ranks_get_cores_of_their_own(
    num_ranks: int,
    cores: set[int],
    given: str | None,
    bound: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang dies at start on one NUMA node without it. The user's binding wins."""
    name = "SGLANG_CPU_OMP_THREADS_BIND"
    monkeypatch.setattr(os, "environ", {name: given} if given else {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    launch_server._bind_cpu_ranks(num_ranks)
    assert os.environ.get(name) == bound


# What is found out before the model is loaded


def test_port_that_is_taken() -> None:
    """The start would else fail minutes later, and ask the other server meanwhile."""
    said: list[str] = []

    def fail(message: str) -> NoReturn:
        said.append(message)
        raise SystemExit(2)

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit):
            launch_server._check_port("127.0.0.1", port, fail)
    launch_server._check_port("127.0.0.1", port, fail)
    assert said == [f"--host 127.0.0.1 --port {port}: Address already in use"]
