"""Which exact chains host memory keeps when they leave the device, and which of them leave it
(CRAFT 4.1, 4.2).

    on the device    A ── B ── C      the device has a chain down from its root, and so has the host
    in host memory   A ── B ── X      C is computed again once it has left, X is loaded behind B

"""

from __future__ import annotations

from typing import Literal, get_args

HostAdmission = Literal["reused", "promoted", "either", "all"]
HOST_ADMISSIONS: tuple[HostAdmission, ...] = get_args(HostAdmission)


def worth_offloading(admission: HostAdmission, *, hits: int, promoted: bool) -> bool:
    """Whether a node is copied to host memory at the end of a request that used it, if its parent
    is there.

    Args:
        admission: `reused`: a request has found it cached; `promoted`: it is promoted; `either` of
            them; `all`.
        hits: requests that found it cached, this one included.
    """
    match admission:
        case "reused":
            return hits > 0
        case "promoted":
            return promoted
        case "either":
            return hits > 0 or promoted
        case "all":
            return True
