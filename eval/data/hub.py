"""Rows of a data set on the Hugging Face hub, or of a local copy of it, through `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from eval.data.rows import Row
from eval.errors import CommandError
from eval.progress import tracked


class HubName(NamedTuple):
    """Arguments of `datasets.load_dataset`. `file` names one of several files."""

    name: str
    config: str | None = None
    split: str = "validation"
    file: str | None = None


def parse_hub(text: str, published: HubName) -> HubName:
    """Parse `NAME[:CONFIG[:SPLIT]]`; missing parts are those of the published set.
    A copy elsewhere has no default config."""
    name, _, rest = text.partition(":")
    config, _, split = rest.partition(":")
    if name in ("", published.name):
        return HubName(
            published.name, config or published.config, split or published.split, published.file
        )
    # A copy's files have names of their own, which `datasets` finds.
    return HubName(name, config or None, split or published.split)


def hub_rows(hub: HubName) -> Iterator[tuple[str, Row]]:
    """("name, row number", row). Raises CommandError if `datasets` cannot load the set."""
    from datasets import load_dataset

    try:
        rows = load_dataset(hub.name, hub.config, split=hub.split, data_files=hub.file)
    except Exception as error:  # of many libraries: no network, no such name, config or split
        told = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CommandError(f"--hub {hub.name}: {told}") from None
    for number, row in enumerate(tracked(f"reading {hub.name}", rows), 1):
        yield f"{hub.name}, row {number}", row
