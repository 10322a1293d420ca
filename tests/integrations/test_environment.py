"""Runs the adapters' tests and examples where only their frameworks are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.examples import PASSAGES, QUESTIONS
from eval.server import Server
from tests.e2e.test_openai_client import WRITES_JSON
from tests.integrations.conftest import JSON_VAR, URL_VAR

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

REPO = Path(__file__).parents[2]
FRAMEWORKS = ("langchain", "llamaindex", "haystack")


@pytest.fixture(scope="module")
def python() -> Path:
    """Of the environment, which is kept."""
    venv = Path(os.environ.get("INTEGRATIONS_VENV", REPO / ".venv-integrations"))
    found = venv / "bin" / "python"
    if not found.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    extras = ",".join(FRAMEWORKS)
    what = ["-q", "--no-compile", "pytest", "-e", f"{REPO}[{extras}]"]
    subprocess.run([str(found), "-m", "pip", "install", *what], check=True)
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("integrations")
    corpus, index = folder / "passages.jsonl", folder / "index"
    lines = [json.dumps({"id": each, "text": text}) for each, text in PASSAGES.items()]
    corpus.write_text("\n".join(lines) + "\n")
    build = ["-m", "retrieval", "build", str(corpus), "--no-split", "--out", str(index)]
    subprocess.run([sys.executable, *build], check=True, cwd=REPO)
    flags = ["--model-path", "bundled", "--index", str(index), "--tool-call-parser", "qwen25"]
    with Server(flags, log=folder / "server.log", env={"OMP_NUM_THREADS": "1"}) as running:
        yield running


def run(python: Path, server: Server, *args: str) -> str:
    env = {**os.environ, URL_VAR: server.url, JSON_VAR: json.dumps(WRITES_JSON)}
    done = subprocess.run(
        [python, *args], cwd=REPO, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_adapter(python: Path, server: Server, name: str) -> None:
    tests = ["-p", "no:cacheprovider", "--confcutdir=tests/integrations", "-o", "addopts="]
    told = run(python, server, "-m", "pytest", *tests, f"tests/integrations/test_{name}.py")
    assert "skipped" not in told


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_example(python: Path, server: Server, name: str) -> None:
    """Answers come from the passages. As chunks more is found than in the text."""
    example = f"eval.examples.{name}_rag"
    told = run(python, server, "-m", example, "--url", server.url)
    lines = told.splitlines()
    question, answer = next(iter(QUESTIONS.items()))
    in_text = "in the text"  # which the toy has not learnt to read
    answers = [line for line in lines if question in line and not line.startswith(in_text)]
    assert answers
    assert all(answer in line for line in answers)
    if name != "haystack":
        text, chunks = (float(line.split()[-1]) for line in lines[-2:])
        assert chunks > text
    print(told)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_nothing_heavy_is_imported(python: Path, name: str) -> None:
    """Not even what the framework has."""
    code = (
        f"import sys, sglang_chunkcache.integrations.{name};"
        " print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code], cwd=REPO, env=env, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
