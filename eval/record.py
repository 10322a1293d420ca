"""What a record says about where its figures come from: command, commit, versions, machine;
and settings without paths."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    *(
        "sglang-chunkcache",
        "sglang",
        "torch",
        "transformers",
        "flashinfer-python",
        "numpy",
        "faiss-cpu",
        "tantivy",
    ),
    *("scikit-learn", "sentence-transformers", "matplotlib", "contextpilot", "lmcache"),
)


def origin() -> dict[str, Any]:
    """`command`, `date`, `versions` and `machine` of this process."""
    # With `-m` sys.argv[0] is a path of this machine; the module's name is in __spec__ alone.
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    args = ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]] if spec else sys.argv
    gpu = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    return {
        "command": " ".join(["python", *map(_without_folder, args)]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {package: _version(package) for package in PACKAGES}
        | {"python": platform.python_version()},
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "gpu": gpu or None},
    }


def portable(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON that does not depend on the machine:
    only the last part of paths, and no output folder."""
    # Without the folders of output, which may move: a run continues only with equal settings.
    kept = {key: value for key, value in spec.items() if key not in ("logs", "out")}
    return dict(
        json.loads(
            json.dumps({key: _without_folder(value) for key, value in kept.items()}, default=str)
        )
    )


def git_state() -> dict[str, Any]:
    """The commit that is checked out, and whether files other than records differ from it."""
    # A record just written would otherwise make the next run of the same code dirty.
    changed = _output(["git", "status", "--porcelain", "--", ":/", ":(top,exclude)eval/results"])
    return {"sha": _output(["git", "rev-parse", "HEAD"]), "dirty": bool(changed)}


def model_sha256(model_path: str) -> str | None:
    """Hex digest of config.json in a model's folder, or in that of `bundled`;
    None if the name is not a local folder."""
    folder = Path(model_path)
    if model_path == "bundled":
        # imported here: a replay has no model
        from sglang_chunkcache.bundled_model import model_dir

        folder = model_dir()
    try:
        return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    except OSError:
        return None


def _output(command: Sequence[str]) -> str:
    """What a command prints; empty if it fails or is not there."""
    try:
        run = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
            # The commit is that of this code, whatever folder the command is run in.
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()


def _without_folder(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folder(item) for item in value]
    # `@` begins a path in --chunkcache-storage-backend-extra-config.
    is_path = isinstance(value, Path) or (
        isinstance(value, str) and value.startswith(("/", "./", "../", "~", "@"))
    )
    return Path(value).name if is_path else value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
