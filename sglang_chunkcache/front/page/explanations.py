"""What each fallback means, and what to do: the table of the folder's README, which is shipped."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)


@cache
def explanations() -> dict[str, tuple[str, str]]:
    """Fallback -> (meaning, advice), without Markdown's marks."""
    readme = resources.files("sglang_chunkcache.front").joinpath("README.md").read_text("utf-8")
    table = readme.split("<!-- fallbacks:")[1].split("<!-- end of fallbacks -->")[0]
    return {
        reason: (meaning.replace("`", ""), advice.replace("`", ""))
        for reason, meaning, advice in ROW.findall(table)
    }
