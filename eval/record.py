"""A run's evidence: `eval/results/<date>-<name>/record.json`. Records are added, never edited."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "sglang-chunkcache",
    "sglang",
    "torch",
    "transformers",
    "flashinfer-python",
    "numpy",
    "faiss-cpu",
    "tantivy",
    "scikit-learn",
    "sentence-transformers",
    "matplotlib",
    "contextpilot",
    "lmcache",
)


def make_record(
    name: str, *, spec: Mapping[str, Any], results: Mapping[str, Any], git: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A record: settings (`spec`), versions, machine and results. Of paths only the last part is kept.

    Args:
        git: `git_state()` when the run began; None: the state now.
    """
    return {
        "name": name,
        "command": " ".join(["python", *map(_without_folder, _module_args())]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": dict(git or git_state()),
        "versions": {package: _version(package) for package in PACKAGES} | {"python": platform.python_version()},
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "gpu": _gpu()},
        "spec": portable(spec),
        "results": dict(results),
    }


def portable(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON that does not depend on the machine: only the last part of paths, and no output folder."""
    kept = {key: value for key, value in spec.items() if key not in ("record", "logs", "out")}
    return dict(json.loads(json.dumps({key: _without_folder(value) for key, value in kept.items()}, default=str)))


def git_state() -> dict[str, Any]:
    """The commit that is checked out, and whether files other than records differ from it."""
    return {
        "sha": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", ":/", ":(top,exclude)eval/results")),
    }


def model_sha256(model_path: str) -> str | None:
    """Hex digest of config.json in a model's folder, or in that of `bundled`; None if the name is not a local folder."""
    folder = Path(model_path)
    if model_path == "bundled":
        from sglang_chunkcache.bundled_model import model_dir  # imported here: a replay has no model

        folder = model_dir()
    try:
        return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    except OSError:
        return None


def _gpu() -> str | None:
    """Name and driver as nvidia-smi gives them; None without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def write_record(record: Mapping[str, Any], *, results_dir: Path = RESULTS) -> Path:
    """Write a record to a new folder and return the folder. Raises FileExistsError if it exists."""
    stamp = str(record["date"])[:16].replace(":", "")
    folder = results_dir / f"{stamp}-{record['name']}"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    return folder


def _without_folder(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folder(item) for item in value]
    is_path = isinstance(value, Path) or (isinstance(value, str) and value.startswith(("/", "./", "../", "~")))
    return Path(value).name if is_path else value


def _module_args() -> list[str]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]] if spec else sys.argv


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
