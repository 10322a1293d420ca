"""The embedded encoder: equal to the naive one, sound at its edges,
and good enough to find things."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hashed_encoder import (
    BM25_B,
    BM25_K1,
    NUM_BUCKETS,
    PASSAGE_RARITY,
    QUERY_RARITY,
    STATE_FILE,
    STEM_CHARS,
    HashedEncoder,
    fit_default,
)
from tests.reference.naive_hashed_encoder import (
    NaiveHashedEncoder,
    naive_leading_subspace,
    naive_project,
)

pytest.importorskip("sklearn")

PASSAGE = {"k1": BM25_K1, "b": BM25_B, "power": PASSAGE_RARITY}

TEXTS = [
    "The retrieval of passages; retrieving a passage.",
    "Béla Bartók: Музыка для струнных, 1936\nsecond line of it_it",
    "東京都に行くabc 行く",
    "one two two three three three four four four four",
    "Ωμέγα and ITS cousins: 'tis the naïveté of 12,345.67",
]


@pytest.fixture(scope="module")
def encoder() -> HashedEncoder:
    return fit_default(TEXTS, dim=24, seed=3)


def make_passages(num_topics: int) -> list[str]:
    """Of common and topic words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(6000)]
    topics = (words[300 + topic * 4 : 304 + topic * 4] for topic in range(num_topics))
    return [" ".join(rng.sample(words[:300], 40) + mine * 2) for mine in topics]


def make_naive(sample: list[str]) -> NaiveHashedEncoder:
    return NaiveHashedEncoder(
        sample, num_buckets=NUM_BUCKETS, stem_chars=STEM_CHARS, unspaced="東京都に行くไทย"
    )


def test_vectors_equal_the_naive_encoder(encoder: HashedEncoder) -> None:
    """Stems, hash, weights and projection, for spaced and unspaced writing."""
    naive = make_naive(TEXTS)
    for text in [*TEXTS, "a new passage of 東京 and Bartók", ""]:
        for weights, vectors in [
            (naive.passage_weights(text, **PASSAGE), encoder.encode_passages([text])),
            (naive.query_weights(text, power=QUERY_RARITY), encoder.encode_queries([text])),
        ]:
            expected = naive_project(weights, encoder.projection)
            np.testing.assert_allclose(vectors[0], expected, atol=1e-5)
            assert vectors.dtype == np.float32
            assert vectors.flags.c_contiguous


def test_first_columns_span_the_leading_singular_vectors() -> None:
    """The randomised decomposition finds what a full one does."""
    sample = make_passages(60)
    projection = fit_default(sample, dim=256, seed=0).projection
    naive = make_naive(sample)
    rows = [naive.passage_weights(text, **PASSAGE) for text in sample]
    exact = naive_leading_subspace(rows, num_vectors=60, num_buckets=NUM_BUCKETS)
    leading, rest = projection[:, :60].astype(np.float64), projection[:, 60:]
    cosines = np.linalg.svd(exact.T @ (leading / np.linalg.norm(leading, axis=0)), compute_uv=False)
    assert cosines.min() > 0.999
    assert np.abs(exact.T @ rest).max() < 0.01, "random columns add nothing to the others"


def test_same_sample_and_seed_give_the_same_encoder(encoder: HashedEncoder) -> None:
    """An interrupted build fits again and must continue in the same space."""
    again = fit_default(TEXTS, dim=24, seed=3).encode_passages(TEXTS)
    assert np.array_equal(again, encoder.encode_passages(TEXTS))
    assert not np.allclose(fit_default(TEXTS, dim=24, seed=4).encode_passages(TEXTS), again)


def test_saved_and_loaded_encoder_gives_the_same_bits(
    encoder: HashedEncoder, tmp_path: Path
) -> None:
    """From a small file, of what the sample's words need."""
    encoder.save(tmp_path / STATE_FILE)
    assert (tmp_path / STATE_FILE).stat().st_size < 5_000
    loaded = HashedEncoder.load(tmp_path / STATE_FILE)
    assert loaded.spec() == encoder.spec()
    assert np.array_equal(loaded.encode_passages(TEXTS), encoder.encode_passages(TEXTS))
    assert np.array_equal(loaded.encode_queries(TEXTS), encoder.encode_queries(TEXTS))


def test_random_columns_are_those_of_every_version() -> None:
    """The signs come from a bit generator, whose stream numpy guarantees."""
    columns = fit_default(TEXTS, dim=24, seed=3).projection[:4, -3:]
    assert np.sign(columns).tolist() == [[1, -1, 1], [1, -1, -1], [-1, 1, -1], [1, -1, 1]]


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "cut", "version", "shape", "array"])
def test_damaged_state_is_refused(encoder: HashedEncoder, tmp_path: Path, damage: str) -> None:
    """One clear error, whatever the file is instead: also another release's."""
    path = tmp_path / STATE_FILE
    encoder.save(path)
    state, whole = dict(np.load(path)), path.read_bytes()
    changes = {"version": {"version": 1}, "shape": {"leading": state["leading"][:9]}}
    contents = {"empty": b"", "text": b"no numbers here", "cut": whole[:-100]}
    path.unlink()
    if damage in contents:
        path.write_bytes(contents[damage])
    elif damage in changes:
        np.savez(path, **(state | changes[damage]))
    elif damage == "array":
        with path.open("wb") as file:
            np.save(file, state["leading"])
    message = "version 1, this release reads 2" if damage == "version" else str(path)
    with pytest.raises(CorruptIndexError, match=message):
        HashedEncoder.load(path)


def test_text_without_words_is_zero(encoder: HashedEncoder) -> None:
    """A NaN would spoil every later search of a FAISS index."""
    for encode in (encoder.encode_passages, encoder.encode_queries):
        for text in ("", " \n", "?!", "\ud800", "\x00"):
            assert not encode([text, "a word"])[0].any()
        assert encode([]).shape == (0, encoder.dim)


def test_huge_text(encoder: HashedEncoder) -> None:
    """A document that was not split is slow, not fatal, and does not overflow."""
    vectors = encoder.encode_passages(["word " * 500_000 + "x" * 1_000_000])
    np.testing.assert_allclose(np.linalg.norm(vectors), 1, atol=1e-5)


def test_vector_does_not_depend_on_the_batch(
    encoder: HashedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed build cuts its batches elsewhere."""
    whole = encoder.encode_passages(TEXTS)
    monkeypatch.setattr("retrieval.hashed_encoder.BATCH", 2)
    assert np.array_equal(encoder.encode_passages(TEXTS), whole)
    assert np.array_equal(np.vstack([encoder.encode_passages([text]) for text in TEXTS]), whole)


def test_threads_share_an_encoder(encoder: HashedEncoder) -> None:
    texts = [f"passage number {i} of many" for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda text: encoder.encode_queries([text])[0], texts))
    assert np.array_equal(np.vstack(rows), encoder.encode_queries(texts))


@pytest.mark.parametrize("num_passages", [1, 2, 50])
def test_small_sample_gives_the_same_dimensions(num_passages: int) -> None:
    """A folder of three notes is a corpus too; a passage is found by its own words."""
    last = num_passages - 1
    sample = [f"note {i}: the keeper of lighthouse{i} is name{i}" for i in range(num_passages)]
    encoder = fit_default(sample, dim=128, seed=0)
    scores = encoder.encode_queries([f"keeper name{last}"]) @ encoder.encode_passages(sample).T
    assert (encoder.dim, int(scores.argmax())) == (128, last)


def test_repeated_passage_fits() -> None:
    """A sample of rank 1 leaves the other dimensions to chance, not to rounding errors."""
    for dim in (2, 9, 32):
        projection = fit_default(["the same words"] * 40, dim=dim, seed=0).projection
        assert projection.shape == (NUM_BUCKETS, dim)
        assert np.isfinite(projection).all()
        assert (np.linalg.norm(projection, axis=0) > 0).all()


@pytest.mark.parametrize(("sample", "dim"), [([], 8), (["", "?"], 8), (["word"], 1)])
def test_unusable_sample_is_refused(sample: list[str], dim: int) -> None:
    with pytest.raises(RetrievalError):
        fit_default(sample, dim=dim, seed=0)


def test_word_that_the_sample_lacks_is_found() -> None:
    """Passages added later bring new names; singular vectors alone would drop them."""
    sample = make_passages(200)
    encoder = fit_default(sample, dim=128, seed=0)
    passages = encoder.encode_passages([f"{sample[i]} zylo{i}" for i in range(50)])
    scores = encoder.encode_queries([f"zylo{i}" for i in range(50)]) @ passages.T
    assert (scores.argmax(axis=1) == np.arange(50)).mean() > 0.7
