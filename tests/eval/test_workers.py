"""Ctrl-C must not wait for the requests that have not been sent."""

import threading

import pytest

from eval.quality.workers import workers


def test_interruption_drops_what_was_not_begun() -> None:
    """A run of forty questions that is interrupted at the first one must not answer the other thirty-nine."""
    begun: list[int] = []
    gate = threading.Event()

    def one(number: int) -> int:
        begun.append(number)
        gate.wait(5)
        return number

    def ask() -> None:
        with workers(1) as pool:
            pool.map(one, range(40))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask()
    gate.set()
    assert len(begun) <= 1


def test_pool_that_is_left_in_peace_does_everything() -> None:
    """Nothing is dropped without an exception."""
    done: list[int] = []
    with workers(2) as pool:
        pool.map(done.append, range(10))
    assert sorted(done) == list(range(10))
