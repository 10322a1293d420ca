"""How many layers are copied ahead, against both pipelines run layer by layer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext.preloading import layers_ahead

LAYERS, SECONDS = st.integers(1, 96), st.integers(0, 10_000)


def simulate(num_layers: int, ahead: int, load: int, compute: int) -> tuple[int, int]:
    """(waited, end): what layers wait for copies once the forward has started, and when it ends;
    in units of a `num_layers`th."""
    copied = [load * (layer + 1) for layer in range(num_layers)]
    now, waited = load * ahead, 0
    for layer in range(num_layers):
        waited += max(0, copied[layer] - now)
        now = max(now, copied[layer]) + compute
    return waited, now


@given(num_layers=LAYERS, load=SECONDS, compute=SECONDS)
def test_no_layer_waits_and_none_is_copied_ahead_for_nothing(
    num_layers: int, load: int, compute: int
) -> None:
    """One layer less and the forward waits, unless it is the first one's,
    which is waited for either way."""
    ahead = layers_ahead(num_layers, load=load, compute=compute)
    assert 1 <= ahead <= num_layers
    assert simulate(num_layers, ahead, load, compute)[0] == 0
    assert ahead == 1 or simulate(num_layers, ahead - 1, load, compute)[0] > 0


@given(num_layers=LAYERS, load=SECONDS, compute=SECONDS)
def test_it_ends_as_early_as_with_any_other_number(
    num_layers: int, load: int, compute: int
) -> None:
    """But for less than a layer's copy, by which the number is rounded up."""
    ends = [simulate(num_layers, ahead, load, compute)[1] for ahead in range(num_layers + 1)]
    assert ends[layers_ahead(num_layers, load=load, compute=compute)] < min(ends) + max(load, 1)


@pytest.mark.parametrize(
    ("load", "compute", "expected"),
    [(2.0, 1.0, 3), (1.0, 100.0, 1), (0.0, 0.0, 1), (0.0, 1.0, 1), (1.0, 0.0, 5)],
    ids=[
        "the paper's figure 19",
        "much faster",
        "nothing known",
        "no load known",
        "no prefill known",
    ],
)
def test_five_layers(load: float, compute: float, expected: int) -> None:
    assert layers_ahead(5, load=load, compute=compute) == expected
