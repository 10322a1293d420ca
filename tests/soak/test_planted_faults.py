"""Faults planted one by one in a copy of the code: the tests of every run notice each of them.

A review once planted such mistakes in the central files, and tests missed five of twenty. Here is
where each is today, and what catches it; whoever changes such a line changes its row, too. Left
out is what makes no difference, or is gone:
- Leader order: that code is gone.
- Order in `ChunkRadixCache.reset`: each part empties itself, asks none of the others and tells the
  front nothing, and only one of them starts the storage.
- A host node's promotion: it is not kept any more. What comes back has the mark of its request.
- Lock while evicting: SGLang itself holds what a promise goes on behind, so the load is the row.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("sglang")

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
COPIED = ("sglang_chunkcache", "radix_ext", "retrieval", "tests")
TIMEOUT_S = 900
"""Of one pytest: some seconds, on idle cores."""
TESTS_FAILED = 1
"""Its exit status; of any higher one nothing has run."""

TABLE = """\
order before a forward        scheduler/tiers.py           fusion/test_promise.py
    host.load_back.before(batch) => fuser.promises.fill(batch), self.host.load_back.before(batch)
queued() is not called        scheduler/tiers.py           scheduler/test_host_chains.py
    self.host.load_back.queued() => pass
chains count requests, too    scheduler/stored_chains.py   scheduler/test_stored_chains.py
    is_request = self._fingerprint is not None => is_request = True
loads are no uses             radix_ext/exact_chains.py    scheduler/test_host_chains.py
    self.index.held.use(host) => pass
age lost                      radix_ext/write_back.py      scheduler/test_host_chains.py
    self._nodes.touch(host, self._facts_of(node).hits) => pass
hits lost on the way back     scheduler/chunk_tree.py      scheduler/test_host_chains.py
    host, host.hits, node => host, 0, node
lock while evicting           scheduler/load_back.py       scheduler/test_host_chains.py
    tree.inc_lock_ref(last) => tree.inc_lock_ref(last := tree.root_node)
busy host nodes leave         radix_ext/exact_chains.py    scheduler/test_host_chains.py
    return bool(variant.blob.is_held) => return False
heads leave before chains     radix_ext/exact_chains.py    scheduler/test_host_chains.py
    or variant.above in self._below => or False
unreachable, and told         scheduler/chunk_cache.py     scheduler/test_host_chains.py
    self.tiers.host.nodes.leaves_device(node) => pass
reachable again, not told     scheduler/chunk_cache.py     scheduler/test_host_chains.py
    host.nodes.came_to_device(node) => pass
slots of busy host nodes      radix_ext/pool_slots.py      scheduler/test_stored_chains.py
    self.is_given_back and not self._num_holds => self.is_given_back
slots of moved KV's sources   fusion/promises.py           fusion/test_host_pool_for_both.py
    for blob in slots_of(plan): => for blob in ():
era                           storage/storage.py           fusion/test_tier.py
    done(job.entry if era == self.naming.era else None) => done(job.entry)
old recipe                    scheduler/chunk_cache.py     fusion/test_promise.py
    known.fused, known.moved, known.promised = None, frozenset(), None => known.promised = None
half a commit                 fusion/promises.py           fusion/test_promise.py
    taken.push(lambda error, *_: allocator.free(slots) if error else None) => pass
KV that could not be filled   fusion/promises.py           fusion/test_promise.py
    state(each.req).is_failed = True => pass
extend reserve                fusion/promises.py           fusion/test_promise.py
    self._tree.line.num_computed(num_after) => 0
failed pass beside            fusion/fill.py               fusion/test_fill_layers.py
    with suppress(Exception): => if False:
two passes beside             scheduler/layer_loads.py     fusion/test_fill_layers.py
    num_ahead = num_ahead if self._overlapped is None else self.num_layers => pass
split of what is loaded       scheduler/chunk_cache.py     scheduler/test_host_chains.py
    self.tiers.host.load_back.split(node, child) => pass
promises of other batches     fusion/promises.py           fusion/test_promise.py
    if id(each.req) not in reqs] => if False]
counted asks of chunks        radix_ext/variant_index.py   ../radix_ext/test_variant_index.py
    [*places, *(identity for identity, _, _ in places)] => places
counted asks of a rank        fusion/keeping.py            fusion/test_promise_store.py
    self._store.ask(asked) => pass
counted asks of a storage     fusion/keeping.py            fusion/test_tier.py
    self._tier.count_asked(asked) => pass
kept twice                    scheduler/chunk_cache.py     scheduler/test_stored_chains.py
    req.origin_input_ids) and not known.is_kept: => req.origin_input_ids):
source locks                  fusion/promises.py           fusion/test_promise.py
    for source in sources: => for source in ():
moved marks                   scheduler/chunk_cache.py     fusion/test_promise.py
    moved=known.moved => moved=()
waiting for what is here      scheduler/tiers.py           scheduler/test_stored_chains.py
    None if _is_here(known.chain, start) else known.chain => known.chain
"""
"""Name, file and what catches it; then the text before and after, the former once in that file."""


class Fault(NamedTuple):
    """Paths are below sglang_chunkcache and its tests, unless they say otherwise."""

    name: str
    file: str
    caught_by: str
    before: str
    after: str


LINES = TABLE.splitlines()
FAULTS = tuple(
    Fault(*re.split("  +", head), *change.strip().split(" => "))
    for head, change in zip(LINES[::2], LINES[1::2], strict=True)
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the code and its tests."""
    folder = tmp_path_factory.mktemp("planted")
    for each in COPIED:
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder: Path, *tests: str) -> tuple[int, str]:
    """Exit status, and the end of what it has said."""
    paths = [os.path.normpath(f"tests/sglang_chunkcache/{each}") for each in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *paths]
    # a file that is changed twice within a second may look as it was compiled
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return done.returncode, (done.stdout + done.stderr)[-4000:]


@contextmanager
def planted(folder: Path, fault: Fault) -> Iterator[None]:
    inside = "" if fault.file.startswith("radix_ext") else "sglang_chunkcache"
    path = folder / inside / fault.file
    text = path.read_text(encoding="utf-8")
    found = text.count(fault.before)
    assert found == 1, f"{fault.file} has this {found} times, its row is old: {fault.before}"
    path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def test_without_a_fault_all_pass(copy: Path) -> None:
    """So what fails with one fails of it."""
    status, said = run(copy, *dict.fromkeys(fault.caught_by for fault in FAULTS))
    assert status == 0, said


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught(copy: Path, fault: Fault) -> None:
    with planted(copy, fault):
        status, said = run(copy, fault.caught_by)
    assert status == TESTS_FAILED, said
