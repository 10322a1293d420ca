"""How many layers of KV are copied before a forward starts, so that it waits for none of the rest
(Cache-Craft 3.4.2, eq. 16).

    copied     |0|1|2|3|4|                       one after the other, `ahead` = 3
    computed         |0|1|2|3|4|                 each once its copy is there

Pure: seconds in, a number of layers out.
"""

from __future__ import annotations


def layers_ahead(num_layers: int, *, load: float, compute: float) -> int:
    """The least number in `[1, num_layers]` with which no layer waits for its copy. All layers are
    taken to be alike.

    Where copying is slower, the last layer decides: its copy has to be there when all before it are
    computed. Elsewhere the first layer's copy is all that has to be waited for.

    Args:
        load: seconds to copy all layers, one after the other.
        compute: seconds to compute all layers.
    """
    if load <= compute:
        return 1
    # Rounded up in layers ahead: with one less than needed the last layer waits.
    return num_layers - int((num_layers - 1) * compute // load)
