"""How many examples Hypothesis draws: all in a nightly run, a fifth by default.
conftest.py loads the profile."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

PROFILES = {"default": 20, "nightly": 100}
"""Profile -> examples of a test that names no number."""

for _name, _examples in PROFILES.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def examples(num: int) -> int:
    """`num` of a nightly run as the loaded profile has it, at least one."""
    return max(1, num * settings.default.max_examples // PROFILES["nightly"])  # type: ignore[union-attr]
