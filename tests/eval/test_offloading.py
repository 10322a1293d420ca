"""What host memory keeps."""

import pytest

from eval.replay.offloading import HostAdmission, worth_offloading


@pytest.mark.parametrize(
    ("admission", "expected"),
    [("reused", "ny ny"), ("promoted", "nn yy"), ("either", "ny yy"), ("all", "yy yy")],
)
def test_rule_by_hits_and_mark(admission: HostAdmission, expected: str) -> None:
    """Not found yet, found once; then the same, promoted."""
    told = [
        "".join("ny"[worth_offloading(admission, hits=hits, promoted=promoted)] for hits in (0, 1))
        for promoted in (False, True)
    ]
    assert " ".join(told) == expected
