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

UNSPACED = "東京都に行くไทย"

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


def make_task(num_topics: int) -> tuple[list[str], list[str]]:
    """Passages of common and topic words, each with one name;
    queries with a few words of a passage and its name."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(6000)]
    common, rare = words[:300], words[300:]
    passages, queries = [], []
    for topic in range(num_topics):
        mine = rare[topic * 4 : topic * 4 + 4]
        passages.append(" ".join(rng.sample(common, 40) + mine * 2))
        queries.append(" ".join([*rng.sample(common, 3), *rng.sample(mine, 2)]))
    return passages, queries


def test_vectors_equal_the_naive_encoder(encoder: HashedEncoder) -> None:
    """Stems, hash, weights and projection are what the docstrings say,
    for spaced and unspaced writing."""
    naive = NaiveHashedEncoder(
        TEXTS, num_buckets=NUM_BUCKETS, stem_chars=STEM_CHARS, unspaced=UNSPACED
    )
    for text in [*TEXTS, "a new passage of 東京 and Bartók", ""]:
        passage = naive.passage_weights(text, k1=BM25_K1, b=BM25_B, power=PASSAGE_RARITY)
        query = naive.query_weights(text, power=QUERY_RARITY)
        np.testing.assert_allclose(
            encoder.encode_passages([text])[0],
            naive_project(passage, encoder.projection),
            atol=1e-5,
        )
        np.testing.assert_allclose(
            encoder.encode_queries([text])[0], naive_project(query, encoder.projection), atol=1e-5
        )


def test_first_columns_span_the_leading_singular_vectors() -> None:
    """The randomised decomposition finds what a full one does."""
    sample = make_task(60)[0]
    projection = fit_default(sample, dim=256, seed=0).projection
    naive = NaiveHashedEncoder(sample, num_buckets=NUM_BUCKETS, stem_chars=STEM_CHARS, unspaced="")
    rows = [
        naive.passage_weights(text, k1=BM25_K1, b=BM25_B, power=PASSAGE_RARITY) for text in sample
    ]
    exact = naive_leading_subspace(rows, num_vectors=60, num_buckets=NUM_BUCKETS)
    leading, rest = projection[:, :60].astype(np.float64), projection[:, 60:]
    cosines = np.linalg.svd(exact.T @ (leading / np.linalg.norm(leading, axis=0)), compute_uv=False)
    assert cosines.min() > 0.999
    assert np.abs(exact.T @ rest).max() < 0.01, (
        "the random columns must not add to what the others hold"
    )


def test_same_sample_and_seed_give_the_same_encoder(encoder: HashedEncoder) -> None:
    """An interrupted build fits again and must continue in the same space;
    another seed is another space."""
    again = fit_default(TEXTS, dim=24, seed=3).encode_passages(TEXTS)
    assert np.array_equal(again, encoder.encode_passages(TEXTS))
    assert not np.allclose(fit_default(TEXTS, dim=24, seed=4).encode_passages(TEXTS), again)


def test_saved_and_loaded_encoder_gives_the_same_bits(
    encoder: HashedEncoder, tmp_path: Path
) -> None:
    """The index is built by the fitted encoder and searched by the loaded one."""
    encoder.save(tmp_path / STATE_FILE)
    loaded = HashedEncoder.load(tmp_path / STATE_FILE)
    assert loaded.spec() == encoder.spec()
    assert np.array_equal(loaded.encode_passages(TEXTS), encoder.encode_passages(TEXTS))
    assert np.array_equal(loaded.encode_queries(TEXTS), encoder.encode_queries(TEXTS))


def test_state_of_a_small_corpus_is_small(encoder: HashedEncoder, tmp_path: Path) -> None:
    """It has what the sample's words need; 64 MB beside three passages would be copied,
    checked and backed up."""
    encoder.save(tmp_path / STATE_FILE)
    assert (tmp_path / STATE_FILE).stat().st_size < 5_000


def test_random_columns_are_those_of_every_version() -> None:
    """An index outlives versions of numpy: the signs come from a bit generator,
    whose stream is guaranteed."""
    columns = fit_default(TEXTS, dim=24, seed=3).projection[:4, -3:]
    assert np.sign(columns).tolist() == [[1, -1, 1], [1, -1, -1], [-1, 1, -1], [1, -1, 1]]


def test_state_of_another_release_is_refused_by_name(
    encoder: HashedEncoder, tmp_path: Path
) -> None:
    """The file of version 1 had the whole matrix."""
    np.savez(tmp_path / STATE_FILE, version=np.int64(1), projection=encoder.projection)
    with pytest.raises(
        CorruptIndexError, match="version 1, this release reads 2; build the index anew"
    ):
        HashedEncoder.load(tmp_path / STATE_FILE)


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "cut", "version", "shape", "array"])
def test_damaged_state_is_refused(encoder: HashedEncoder, tmp_path: Path, damage: str) -> None:
    """One clear error, whatever the file is instead."""
    path = tmp_path / STATE_FILE
    encoder.save(path)
    state = dict(np.load(path))
    if damage == "missing":
        path.unlink()
    elif damage in ("empty", "text"):
        path.write_text("" if damage == "empty" else "no numbers here")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "array":
        path.write_bytes(b"")
        with path.open("wb") as file:
            np.save(file, state["leading"])
    else:
        changed = (
            {"version": np.int64(0)} if damage == "version" else {"leading": state["leading"][:9]}
        )
        np.savez(path, **(state | changed))
    with pytest.raises(CorruptIndexError):
        HashedEncoder.load(path)


def test_vectors_have_length_one_and_the_promised_type(encoder: HashedEncoder) -> None:
    """Inner products are cosines, and FAISS takes the array as it is."""
    for vectors in (encoder.encode_passages(TEXTS), encoder.encode_queries(TEXTS)):
        assert vectors.shape == (len(TEXTS), encoder.dim)
        assert vectors.dtype == np.float32
        assert vectors.flags.c_contiguous
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("text", ["", " \n", "?!", "\ud800", "\x00"])
def test_text_without_words_is_zero(encoder: HashedEncoder, text: str) -> None:
    """A NaN would spoil every later search of a FAISS index."""
    for encode in (encoder.encode_passages, encoder.encode_queries):
        assert not encode([text, "a word"])[0].any()


def test_no_texts_give_no_rows(encoder: HashedEncoder) -> None:
    """The last batch of a build may be empty."""
    assert encoder.encode_passages([]).shape == encoder.encode_queries([]).shape == (0, encoder.dim)


def test_huge_text(encoder: HashedEncoder) -> None:
    """A document that was not split is slow, not fatal, and does not overflow."""
    vectors = encoder.encode_passages(["word " * 500_000 + "x" * 1_000_000])
    assert np.isfinite(vectors).all()
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
    """The server encodes in several threads at once."""
    texts = [f"passage number {i} of many" for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda text: encoder.encode_queries([text])[0], texts))
    assert np.array_equal(np.vstack(rows), encoder.encode_queries(texts))


@pytest.mark.parametrize("num_passages", [1, 2, 50])
def test_small_sample_gives_the_same_dimensions(num_passages: int) -> None:
    """A folder of three notes is a corpus too; a passage is found by its own words."""
    sample = [
        f"note {i}: the keeper of lighthouse{i} is called name{i}" for i in range(num_passages)
    ]
    encoder = fit_default(sample, dim=128, seed=0)
    scores = (
        encoder.encode_queries([f"keeper name{num_passages - 1}"])
        @ encoder.encode_passages(sample).T
    )
    assert encoder.dim == 128
    assert scores.argmax() == num_passages - 1


@pytest.mark.parametrize("dim", [2, 3, 9])
def test_few_dimensions_are_enough_to_fit(dim: int) -> None:
    """At least one singular vector and one random column."""
    assert fit_default(TEXTS, dim=dim, seed=0).encode_passages(TEXTS).shape == (len(TEXTS), dim)


def test_repeated_passage_fits() -> None:
    """A sample of rank 1 leaves the other dimensions to chance, not to rounding errors."""
    encoder = fit_default(["the same words"] * 40, dim=32, seed=0)
    assert np.isfinite(encoder.projection).all()
    assert (np.linalg.norm(encoder.projection, axis=0) > 0).all()


@pytest.mark.parametrize(("sample", "dim"), [([], 8), (["", "?"], 8), (["word"], 1)])
def test_unusable_sample_is_refused(sample: list[str], dim: int) -> None:
    """Nothing to fit on is the caller's mistake, and said so."""
    with pytest.raises(RetrievalError):
        fit_default(sample, dim=dim, seed=0)


def test_more_similar_text_scores_higher(encoder: HashedEncoder) -> None:
    """Shared stems count, rare ones more."""
    query = encoder.encode_queries(["retrieve passages"])[0]
    near, far = encoder.encode_passages(["passages retrieved", "струнных цитата"])
    assert query @ near > query @ far + 0.3


def test_word_that_the_sample_lacks_is_found() -> None:
    """Passages added later bring new names; singular vectors alone would drop them."""
    sample, _ = make_task(200)
    encoder = fit_default(sample, dim=128, seed=0)
    passages = encoder.encode_passages([f"{sample[i]} zylo{i}" for i in range(50)])
    scores = encoder.encode_queries([f"zylo{i}" for i in range(50)]) @ passages.T
    assert (scores.argmax(axis=1) == np.arange(50)).mean() > 0.7


def test_finds_passages_among_hundreds() -> None:
    """A transposed, unfitted or unweighted projection falls far below."""
    passages, queries = make_task(600)
    encoder = fit_default(passages, dim=384, seed=0)
    scores = encoder.encode_queries(queries) @ encoder.encode_passages(passages).T
    top = np.argsort(-scores, axis=1)[:, :5]
    recall = np.mean([i in row for i, row in enumerate(top)])
    assert recall > 0.9
