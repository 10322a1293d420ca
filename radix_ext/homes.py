"""Which ranks have a conversation's history, and how much of it: each rank up to the last turn that
it has served.

```
turns 1 to 3     rank 0 | rank 0 | rank 1 | the next turn
                 ────────────────►              rank 0 has two turns
                 ─────────────────────────►     rank 1, which computed them again, has all three
```
No tree knows this: its chains end with a first turn's chunks. Whether a rank has evicted a history
is not known here, so a home is a hint like the tree. It ends with the rank's epoch: a flush or a
restart leaves nothing.
"""

from collections.abc import Sequence

from radix_ext.conversation import Turn


def held_history(
    turns: Sequence[Turn], epochs: Sequence[int], *, recipe: str = ""
) -> dict[int, int]:
    """Rank -> tokens of the prompt that begins with `turns` which the rank has, where it has any.

    `epochs` are the ranks' now. `recipe` is the next turn's, "" for an exact one. A fused turn,
    whose recipe is its tag, is found by the same recipe alone.
    """
    held: dict[int, int] = {}
    num_tokens = 0
    for turn in turns:
        home, start = turn.home, num_tokens
        num_tokens += turn.num_tokens
        if (
            home is not None
            # Its KV stands at other positions there, where the prompt had other turns in front.
            and home.start == start
            and epochs[home.rank] == home.epoch
            and turn.tag in ("", recipe)
        ):
            held[home.rank] = num_tokens
    return held
