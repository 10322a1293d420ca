"""Patterns that keep `re` busy, and such that do not."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("sglang")

from sglang_chunkcache.front.guard.slow_regex import explodes

EXPLODING = r"""
    (a+)+b (a*)*$ ((a+)?)*b (a+b?)+c (a+|c)*b (x(?:a+)+?y)z (a{2,})*b (a{1,5})+b (ab|ab)*c (a|a)*b
    (a|aa)+b (aa|a)*b (?:a|a.)*b (a+a+)+b (a+){1,60}b (a{1,30}){1,30}b (a?){60}a{60}b (?=(a+)+b)
    (?>(a+)+b) (?!(a+)+b)c (\w+\s?)+x ([a-z]+[0-9a-z]*)+! a*a*a*a*b .*x.*y.*z.*q (?:.*,){11}P (é+)+x
"""
HARMLESS = r"""
    x [.!?] \d+ a*a*b (a|b)*c (a+b)+c (\w+\s)+x (ab|cd)*x (?:abc){3} a{60} ( [ (?:foo|bar)+
    Observation:\s* \n\s*\n\s*[A-Z]+: (a{1,5}){1,3}b (a|a)b (?:a++b)+c (a|[ab])+c
"""


@pytest.mark.parametrize("pattern", EXPLODING.split())
def test_exploding_pattern_is_found(pattern: str) -> None:
    """Bounded counts, branches that begin alike, look-ahead, a power of the length."""
    assert explodes(pattern)


@pytest.mark.parametrize("pattern", ["", "\n\n", *HARMLESS.split()])
def test_harmless_pattern_is_not(pattern: str) -> None:
    """Such as clients stop at, and what `re` refuses by itself."""
    assert not explodes(pattern)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "pattern", ["(a|a)*b", "(a|aa)+b", "(a+a+)+b", "(a{1,30}){1,30}b", "(?=(a+)+b)", "(a{1,5})+b"]
)
def test_it_really_does(pattern: str) -> None:
    """A search in 60 letters does not end in ten seconds."""
    search = [sys.executable, "-c", f"import re; re.search({pattern!r}, 'a' * 60)"]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(search, timeout=10, check=True)
