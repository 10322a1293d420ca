"""The launcher's flags: what is ours, what is SGLang's, what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from retrieval.errors import CorruptIndexError
from sglang_chunkcache import config, launch_server
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.front import startup
from sglang_chunkcache.launch_server import CPU_FLAGS, found_models, refusals, server_flags
from sglang_chunkcache.plugin import BACKEND


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("gpu")
def test_flags_select_our_cache() -> None:
    """By name: a scheduler without us must not start."""
    assert server_flags(["--model-path", "m"], stock=False) == [
        "--model-path",
        "m",
        "--radix-cache-backend",
        BACKEND,
    ]


@pytest.mark.usefixtures("gpu")
def test_stock_flags_are_the_users() -> None:
    """`--stock` is SGLang as it is."""
    given = ["--model-path", "m", "--radix-cache-backend", "x"]
    assert server_flags(given, stock=True) == given


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "flag", [["--radix-cache-backend", "x"], ["--radix-cache-backend=x"]], ids=repr
)
def test_another_cache_is_refused(flag: list[str]) -> None:
    """Both at once would leave us out."""
    with pytest.raises(ValueError, match=r"--radix-cache-backend.*--stock"):
        server_flags(flag, stock=False)


@pytest.mark.parametrize(
    "given",
    [["--model-path", "bundled"], ["--model-path=bundled"], ["--model", "bundled"]],
    ids=repr,
)
def test_bundled_model_becomes_a_path(given: list[str]) -> None:
    """In every spelling, with other flags around it, and for the tokenizer, too."""
    flags = found_models(["--port", "1", *given, "--tp", "1", "--tokenizer-path=bundled"])
    flag = given[0].split("=")[0]
    assert flags == [
        "--port",
        "1",
        flag,
        str(model_dir()),
        "--tp",
        "1",
        "--tokenizer-path",
        str(model_dir()),
    ]


@pytest.mark.parametrize("other", ["--model-path-extra", "--model-paths=bundled"])
def test_flag_that_only_begins_like_model_path_is_left_alone(other: str, tmp_path: Path) -> None:
    """The model's path is looked up by its whole name."""
    given = [other, "--model-path", str(tmp_path)]
    assert found_models(given) == given


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (
            [],
            (
                "--model-path is missing: a model's folder, its name on the Hugging Face hub, or"
                " bundled"
            ),
        ),
        (["--model-path", "./nosuch/model"], "'./nosuch/model': no such file or folder"),
        (["--stock", "--model-path=./nosuch"], "'./nosuch': no such file or folder"),
    ],
)
def test_missing_model_is_said_in_one_line(
    argv: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 2, before SGLang is imported."""
    monkeypatch.setattr(
        launch_server, "server_flags", lambda *args, **kwargs: pytest.fail("goes on")
    )
    with pytest.raises(SystemExit) as caught:
        launch_server.main(argv)
    assert caught.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: python -m sglang_chunkcache.launch_server --model-path M [flags]"
    assert error.endswith(f"error: {reason}")


@pytest.mark.usefixtures("cpu")
def test_cpu_flags_are_added() -> None:
    """A machine without GPU needs them all."""
    flags = server_flags(["--model-path", "m"], stock=True)
    for flag, value in CPU_FLAGS.items():
        assert flag in flags
        assert value is None or flags[flags.index(flag) + 1] == value


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("given", [["--max-total-tokens", "9"], ["--max-total-tokens=9"]], ids=repr)
def test_cpu_flags_do_not_overrule_the_users(given: list[str]) -> None:
    """In both spellings."""
    flags = server_flags(given, stock=True)
    assert flags[: len(given)] == given
    assert "65536" not in flags


def test_flags_given_are_not_changed_in_place() -> None:
    """The caller's list is the caller's."""
    given = ["--model-path=bundled"]
    server_flags(found_models(given), stock=False)
    assert given == ["--model-path=bundled"]


def args(**changes: Any) -> SimpleNamespace:
    plain = {
        "tokenizer_worker_num": 1,
        "disable_radix_cache": False,
        "page_size": 1,
        "speculative_algorithm": None,
        "enable_hierarchical_cache": False,
        "disaggregation_mode": "null",
        "skip_tokenizer_init": False,
        "kv_events_config": None,
    }
    return SimpleNamespace(**{**plain, **changes})


def test_plain_settings_are_not_refused() -> None:
    """SGLang's defaults, also where it leaves a number open."""
    assert refusals(args()) == []
    assert refusals(args(page_size=None, tokenizer_worker_num=None, disaggregation_mode=None)) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"page_size": 16}, "--page-size"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"skip_tokenizer_init": True}, "--skip-tokenizer-init"),
    ],
    ids=repr,
)
def test_unsupported_setting_is_named(change: dict[str, Any], named: str) -> None:
    """What can be known at start-up is refused at start-up."""
    (reason,) = refusals(args(**change))
    assert reason.startswith(named)


class Started(Exception):
    """Replaces the server that would start."""


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


def test_main_hands_the_configuration_over(run: list[Any]) -> None:
    """Our flags are ours, the rest is SGLang's."""
    launch_server.main(
        ["--model-path", "bundled", "--chunkcache-order", "frequency", "--port", "1"]
    )
    settings = config.from_env(os.environ)
    assert settings is not None
    assert (settings.order, bool(settings.secret)) == ("frequency", True)
    (flags, _) = run[0]
    assert flags[:4] == ["--model-path", str(model_dir()), "--port", "1"]


@pytest.mark.parametrize(
    ("flags", "log"),
    [([], "brief"), (["--log-level", "info"], "all"), (["--log-level=debug"], "all")],
)
def test_log_level_of_sglangs_shows_everything(run: list[Any], flags: list[str], log: str) -> None:
    """Whoever asks for a level wants to see its lines."""
    launch_server.main(["--model-path", "bundled", *flags])
    settings = config.from_env(os.environ)
    assert settings is not None
    assert settings.log == log


def test_main_stock_leaves_no_configuration(run: list[Any]) -> None:
    """An inherited configuration would switch our endpoints on."""
    os.environ[config.ENV_VAR] = "{}"
    launch_server.main(["--model-path", "bundled", "--stock"])
    assert config.ENV_VAR not in os.environ
    assert run[0][1]["stock"] is True


def test_main_opens_the_index_first(run: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By either name; `--stock` has no use for one."""
    monkeypatch.setattr(
        startup, "open_retriever", lambda settings: f"retriever of {settings.index}"
    )
    for flags in (["--index", "i"], ["--chunkcache-index", "i"], ["--index", "i", "--stock"], []):
        launch_server.main(["--model-path", "bundled", *flags])
    assert [kwargs["retriever"] for _, kwargs in run] == [
        "retriever of i",
        "retriever of i",
        None,
        None,
    ]


def test_main_bad_index_exits_with_2(
    run: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, before anything is loaded."""

    def refuse(settings: Any) -> Any:
        raise CorruptIndexError(f"{settings.index}: a checksum differs")

    monkeypatch.setattr(startup, "open_retriever", refuse)
    with pytest.raises(SystemExit) as caught:
        launch_server.main(["--model-path", "bundled", "--index", "i"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("error: --index: i: a checksum differs\n")
    assert not run


def test_without_an_index_nothing_of_retrieval_is_loaded() -> None:
    """faiss is no dependency of a server that does not search;
    SGLang's processes import the launcher as well."""
    code = (
        "import sys; from sglang_chunkcache import launch_server; from sglang_chunkcache.front"
        " import startup;sys.exit(any(name in sys.modules for name in ('faiss', 'tantivy',"
        " 'retrieval.retriever')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--chunkcache-window-requests", "0"],
        ["--chunkcache-order", "x"],
        ["--radix-cache-backend", "x"],
    ],
    ids=repr,
)
def test_main_mistake_exits_with_2(
    flags: list[str], run: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the flag."""
    with pytest.raises(SystemExit) as caught:
        launch_server.main(["--model-path", "bundled", *flags])
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err
    assert not run


STORAGE = "--chunkcache-storage-backend"
FUSED = ["--reuse", "fused", STORAGE]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*FUSED, "hf3fs"], "backend hf3fs is not supported, only file and dynamic"),
        ([*FUSED, "nixl"], "backend nixl is not supported, only file and dynamic"),
        ([STORAGE, "file", "--chunkcache-host-mib", "0"], "backend needs --chunkcache-host-mib"),
        ([*FUSED, "dynamic"], "backend dynamic needs --chunkcache-storage-mib"),
        (["--chunkcache-storage-mib", "5"], "backend is missing"),
        ([f"{STORAGE}-extra-config", "{}"], "backend is missing"),
        ([*FUSED, "file", f"{STORAGE}-extra-config", "{"], "backend-extra-config: "),
    ],
)
def test_main_storage_that_cannot_be_exits_with_2(
    flags: list[str], message: str, run: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is loaded, in a sentence."""
    with pytest.raises(SystemExit) as caught:
        launch_server.main(["--model-path", "bundled", *flags])
    assert caught.value.code == 2
    assert f"error: --chunkcache-storage-{message}" in capsys.readouterr().err
    assert not run


def test_main_storage_with_two_secrets_exits_with_2(
    run: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than to guess which is meant."""
    monkeypatch.setenv("SGLANG_CHUNKCACHE_STORAGE_SECRET", "a")
    monkeypatch.setenv("SGLANG_CHUNKCACHE_STORAGE_SECRET_FILE", "b")
    with pytest.raises(SystemExit):
        launch_server.main(["--model-path", "bundled", *FUSED, "file"])
    assert "are both set" in capsys.readouterr().err
    assert not run


def test_main_with_a_storage_starts(run: list[Any]) -> None:
    """Folder and manifest are the ranks' own affair."""
    launch_server.main(["--model-path", "bundled", *FUSED, "file"])
    assert run


SPARSE = ["--recompute-attention", "sparse"]


@pytest.mark.usefixtures("cpu")
def test_main_sparse_attention_without_cuda_exits_with_2(
    run: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is loaded. What only the loaded model tells is refused by the cache
    (test_choice.py)."""
    with pytest.raises(SystemExit) as caught:
        launch_server.main(["--model-path", "bundled", "--reuse", "fused", *SPARSE])
    assert caught.value.code == 2
    assert "error: --recompute-attention sparse: there is no CUDA device" in capsys.readouterr().err
    assert not run


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "flags", [["--reuse", "fused"], ["--reuse", "fused", "--stock", *SPARSE]], ids=" ".join
)
def test_main_without_cuda_starts_where_nothing_needs_it(run: list[Any], flags: list[str]) -> None:
    """By default the pass takes what there is."""
    launch_server.main(["--model-path", "bundled", *flags])
    assert run


@pytest.mark.usefixtures("gpu")
def test_main_sparse_attention_without_moved_kv_exits_with_2(
    run: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who asks for it would believe that it runs."""
    with pytest.raises(SystemExit) as caught:
        launch_server.main(["--model-path", "bundled", *SPARSE])
    assert caught.value.code == 2
    assert "--recompute-attention sparse needs --reuse fused" in capsys.readouterr().err
    assert not run


@pytest.mark.usefixtures("gpu")
def test_main_sparse_attention_with_cuda_starts(run: list[Any]) -> None:
    launch_server.main(["--model-path", "bundled", "--reuse", "fused", *SPARSE])
    assert run


def test_cpu_ranks_get_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang dies at start on one NUMA node without it."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    launch_server._bind_cpu_ranks(2)
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"


def test_cpu_ranks_share_cores_when_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than cores still start."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7}, raising=False)
    launch_server._bind_cpu_ranks(3)
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "5|7|5"


@pytest.mark.parametrize(("dp_size", "given"), [(1, {}), (2, {"SGLANG_CPU_OMP_THREADS_BIND": "x"})])
def test_cpu_binding_of_the_user_stays(
    dp_size: int, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank needs none, and the user's wins."""
    monkeypatch.setattr(os, "environ", dict(given))
    launch_server._bind_cpu_ranks(dp_size)
    assert os.environ == given
