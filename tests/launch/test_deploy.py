"""launch/deploy says what the server says: flags, probes, times, paths, versions."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import yaml
from sglang.srt.server_args import ServerArgs

from sglang_chunkcache.config import flag_fields, flag_name
from sglang_chunkcache.front.drain import HEALTH, LAST_S, READY

ROOT = Path(__file__).parents[2]
DEPLOY, README = ROOT / "launch/deploy", ROOT / "sglang_chunkcache/front/README.md"
IMAGES = {name: (DEPLOY / f"Dockerfile.{name}").read_text() for name in ("cpu", "cuda")}
UNIT = (DEPLOY / "sglang-chunkcache.service").read_text()
_, _, STATEFUL_SET = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
POD: dict[str, Any] = STATEFUL_SET["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
UNIT_COMMAND = shlex.split(re.findall(r"(?s)^ExecStart=(.*?[^\\])$", UNIT, re.M)[0])
COMMANDS = {"unit": UNIT_COMMAND, "pod": [str(each) for each in SERVER["args"]]}
COMMANDS |= {
    name: re.findall(r'"([^"]+)"', text.split("ENTRYPOINT")[1]) for name, text in IMAGES.items()
}


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_exist(name: str) -> None:
    """A misspelt one would stop the start."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {*parser._option_string_actions, *(flag_name(knob.name) for knob in flag_fields())}
    used = {word for word in COMMANDS[name] if word.startswith("--")}
    assert used
    assert used <= known


def seconds(command: list[str], field: str) -> float:
    """Of a flag of ours, where it is not set its default."""
    flag = flag_name(field)
    if flag in command:
        return float(command[command.index(flag) + 1])
    (default,) = [knob.default for knob in flag_fields() if knob.name == field]
    return float(str(default))


@pytest.mark.parametrize("name", ["unit", "pod"])
def test_server_may_drain(name: str) -> None:
    """Killed before, it would cut answers off."""
    given = float(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)[0])
    given = POD["terminationGracePeriodSeconds"] if name == "pod" else given
    told = [seconds(COMMANDS[name], field) for field in ("lame_duck_s", "drain_s")]
    assert given >= sum(told) + LAST_S + 5


def test_probes_are_the_pages() -> None:
    """Those of the README, at paths that answer without a key."""
    page = README.read_text().split("## Probes")[1].split("```yaml")[1].split("```")[0]
    (told,) = yaml.safe_load(page)["spec"]["containers"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe, expected = SERVER[kind], told[kind]
        assert probe["httpGet"]["path"] in (READY, *HEALTH)
        assert probe == {**expected, "httpGet": {**expected["httpGet"], "port": "http"}}
    assert f"http://127.0.0.1:30000{READY};" in UNIT


def test_ports_agree() -> None:
    assert SERVER["ports"] == [{"name": "http", "containerPort": 30000}]
    for name in ("cpu", "cuda", "unit"):
        assert COMMANDS[name][COMMANDS[name].index("--port") + 1] == "30000"
    assert all("EXPOSE 30000\n" in text for text in IMAGES.values())


@pytest.mark.parametrize("name", IMAGES)
def test_image_is_what_setup_installs(name: str) -> None:
    """Versions are said in pyproject.toml and launch/setup.sh alone; the user is the pod's, and
    what it writes is on volumes."""
    text = IMAGES[name]
    assert f"CHUNKCACHE_SETUP={name} " in text
    assert "==" not in text
    assert f"sglang-chunkcache:{VERSION}-{name}" in text
    copied = [path for line in re.findall(r"^COPY (.+)$", text, re.M) for path in line.split()[:-1]]
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert f"USER {POD['securityContext']['runAsUser']}\n" in text
    mounts = {mount["mountPath"] for mount in SERVER["volumeMounts"]}
    assert {*re.findall(r"^VOLUME (.+)$", text, re.M)[0].split(), "/tmp", "/dev/shm"} <= mounts


def test_pod_runs_the_image() -> None:
    assert SERVER["image"] == f"sglang-chunkcache:{VERSION}-cuda"
