"""Which tests run, and fixtures of all of them: real data by environment variable, a tiny random
model, numeric tolerances.

Tests marked `nightly` run where `-m` names it (launch/test.sh -m nightly), and then every
Hypothesis test runs with them, in full. Without torch or SGLang the tests that need them are
skipped; the rest stays green.
"""

from __future__ import annotations

import gc
import os
import re
import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

import tests.examples  # noqa: F401  registers Hypothesis's profiles

# Until all tests are collected: imports leave no garbage, and looking for it takes seconds.
gc.disable()

if find_spec("torch") is not None:
    from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

    define_torchvision_ops()  # before anything of SGLang or transformers is imported

ROOT = Path(__file__).parent.parent
DATA_VAR = "CHUNKCACHE_DATA"

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest absolute difference of two log probabilities that still counts as equal, by the model's
dtype: different cached lengths change the order of summation, and bfloat16 keeps 8 bits. A key at a
wrong position costs far more."""

CI_MINUTES = 12
"""What the whole of .ci/run, set-up included, may take on two idle cores;
it tells when it began by `CI_STARTED`."""


def is_nightly(config: pytest.Config) -> bool:
    """Whether `-m` asks for the slow sweeps."""
    return re.search(r"(?<!not )\bnightly\b", config.option.markexpr) is not None


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("nightly" if is_nightly(config) else "default")
    config.option.loadscopereorder = False  # by seconds, below, not by number of tests


@cache
def asks_for_rag_server(file: str) -> bool:
    """Whether a test there does."""
    is_server_test = file.startswith("tests/e2e/")
    return is_server_test and "rag_server" in (ROOT / file).read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 3`, tests of one file stay together, and so do all files that share the session's
    server.

    `--dist loadgroup` would say so by marks, but pytest-xdist 3.8 does not see them under pytest
    9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "rag_server" if asks_for_rag_server(file) else file

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the slow sweeps out unless asked for; then each Hypothesis test is one of them. What
    takes longest as one scope begins first, so that no process ends alone."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/e2e/"))
    if is_nightly(config):
        for item in items:
            if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
                item.add_marker("nightly")
    elif slow := [item for item in items if item.get_closest_marker("nightly")]:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_collection_finish() -> None:
    """What the imports have left takes a second of each full garbage collection, and stays."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Extension modules complain, after pytest's closing line, of what is not freed at the end."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A warning in front of the closing line when .ci/run has taken too long."""
    minutes = (time.time() - float(os.environ.get("CI_STARTED", "inf"))) / 60
    if minutes > CI_MINUTES:
        terminalreporter.write_line(
            f"ci: warning: {minutes:.1f} minutes, set-up included; {CI_MINUTES} are the aim"
        )


@pytest.fixture(scope="session")
def tolerances() -> dict[str, float]:
    """dtype -> largest absolute difference of log probabilities."""
    return TOLERANCES


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory with the real data sets. For tests marked `data`."""
    path = os.environ.get(DATA_VAR)
    if not path or not Path(path).is_dir():
        pytest.skip(f"{DATA_VAR} names no directory")
    return Path(path)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama in bfloat16 with a ChatML-like template, as files."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.reference.tiny_tokenizer import make_tokenizer

    path = tmp_path_factory.mktemp("tiny_model")
    tokenizer = make_tokenizer(vocab_size=2048)
    tokenizer.save_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(
        path, safe_serialization=True
    )
    return path
