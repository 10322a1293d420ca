"""Models on disk as encoders: a random two-layer BERT with a WordPiece tokenizer, written here."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.encoder import load_encoder
from retrieval.errors import RetrievalError
from retrieval.sentence_encoder import SentenceEncoder, own_prefixes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")

WORDS = [
    "the",
    "a",
    "of",
    "storm",
    "lighthouse",
    "harbour",
    "ship",
    "which",
    "who",
    "query",
    "passage",
    ":",
    "?",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *WORDS,
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS),
]
TEXTS = [
    "the keeper of the lighthouse",
    "a storm",
    "which ship is called the harbour of night ?",
    "zzz",
]
HIDDEN = 32
MAX_TOKENS = 24


def write_model(folder: Path, seed: int) -> Path:
    """A plain transformers model, as Contriever is published."""
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(VOCAB))
    tokenizer = transformers.BertTokenizerFast(
        vocab={w: i for i, w in enumerate(VOCAB)}, model_max_length=MAX_TOKENS
    )
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(VOCAB),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.5,
    )
    torch.manual_seed(seed)
    transformers.BertModel(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


def make_encoder(path: Path | str, **changes: Any) -> SentenceEncoder:
    settings: dict[str, Any] = {
        "device": "cpu",
        "batch_size": 2,
        "query_prefix": None,
        "passage_prefix": None,
        "normalize": True,
    }
    return SentenceEncoder(str(path), **(settings | changes))


def mean_pooled(path: Path, texts: Sequence[str], *, normalize: bool) -> NDArray[np.float32]:
    """The slow reference: plain transformers, one text at a time, the mean over its tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    rows = []
    for text in texts:
        with torch.no_grad():
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=MAX_TOKENS)
            rows.append(model(**ids).last_hidden_state[0].mean(dim=0).numpy())
    vectors = np.vstack(rows)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors


@pytest.mark.parametrize("normalize", [True, False])
def test_plain_model_equals_mean_pooling(model_dir: Path, normalize: bool) -> None:
    """Contriever and its like come without pooling; padding in a batch must not count."""
    encoder = make_encoder(model_dir, normalize=normalize)
    expected = mean_pooled(model_dir, TEXTS, normalize=normalize)
    for vectors in (encoder.encode_passages(TEXTS), encoder.encode_queries(TEXTS)):
        assert vectors.shape == (len(TEXTS), HIDDEN)
        assert vectors.dtype == np.float32
        assert vectors.flags.c_contiguous
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_explicit_prefixes_reach_the_model(model_dir: Path) -> None:
    """E5's way: without them it loses recall."""
    encoder = make_encoder(model_dir, query_prefix="query: ", passage_prefix="passage: ")
    expected = [
        mean_pooled(model_dir, [f"{p}: {t}" for t in TEXTS], normalize=True)
        for p in ("query", "passage")
    ]
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), expected[0], atol=1e-5)
    np.testing.assert_allclose(encoder.encode_passages(TEXTS), expected[1], atol=1e-5)


def test_prompts_of_the_model_are_its_prefixes(model_dir: Path, tmp_path: Path) -> None:
    """A model that brings its prompts needs no flags, and flags win over them."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(
        str(model_dir), device="cpu", prompts={"query": "who: ", "passage": "the: "}
    )
    model.save(str(tmp_path / "prompted"))
    own = make_encoder(tmp_path / "prompted")
    assert (own.query_prefix, own.passage_prefix) == ("who: ", "the: ")
    np.testing.assert_allclose(
        own.encode_queries(["ship"]),
        mean_pooled(model_dir, ["who: ship"], normalize=True),
        atol=1e-5,
    )
    none = make_encoder(tmp_path / "prompted", query_prefix="", passage_prefix="")
    np.testing.assert_allclose(
        none.encode_queries(["ship"]), mean_pooled(model_dir, ["ship"], normalize=True), atol=1e-5
    )


BGE = "Represent this sentence for searching relevant passages: "


@pytest.mark.parametrize(
    ("name", "prompts", "expected"),
    [
        ("intfloat/e5-base-v2", {}, ("query: ", "passage: ")),
        ("/models/multilingual-e5-small/", {"query": "", "document": ""}, ("query: ", "passage: ")),
        ("BAAI/bge-small-en-v1.5", {}, (BGE, "")),
        ("BAAI/bge-small-en-v1.5", {"query": "own: "}, ("own: ", "")),
        ("x/y", {"document": "d: ", "passage": "p: "}, ("", "d: ")),
        ("intfloat/multilingual-e5-large-instruct", {}, ("", "")),
        ("BAAI/bge-m3", {}, ("", "")),
        ("e5-base-v2/other", {}, ("", "")),
    ],
)
def test_own_prefixes(name: str, prompts: dict[str, str], expected: tuple[str, str]) -> None:
    """Configured prompts first, then what is published for exactly that name."""
    assert own_prefixes(name, prompts) == expected


def test_published_prefix_reaches_an_encoder_by_its_folder(tmp_path: Path) -> None:
    """A downloaded E5 keeps its name as its folder's."""
    encoder = make_encoder(write_model(tmp_path / "e5-small-v2", seed=0))
    assert (encoder.spec()["query_prefix"], encoder.spec()["passage_prefix"]) == (
        "query: ",
        "passage: ",
    )


def test_long_text_is_cut_at_max_tokens(model_dir: Path) -> None:
    """Cut, not refused: what comes after the model's limit does not count."""
    encoder = make_encoder(model_dir)
    assert encoder.max_tokens == MAX_TOKENS
    text = "the storm " * MAX_TOKENS
    short, long = encoder.encode_passages([text, text + "lighthouse"])
    np.testing.assert_allclose(long, short, atol=1e-5)


@pytest.mark.parametrize("texts", [[], [""], ["\ud800"], ["\x00"], ["東京 🙂"]])
def test_odd_texts_give_finite_vectors(model_dir: Path, texts: list[str]) -> None:
    """One broken passage must not stop a build of millions."""
    vectors = make_encoder(model_dir).encode_passages(texts)
    assert vectors.shape == (len(texts), HIDDEN)
    assert np.isfinite(vectors).all()


def test_threads_share_an_encoder(model_dir: Path) -> None:
    """The server encodes in several threads; a fast tokenizer used by two at once raises."""
    encoder = make_encoder(model_dir)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda i: encoder.encode_queries([TEXTS[i % 4]])[0], range(32)))
    np.testing.assert_allclose(
        np.vstack(rows), np.tile(encoder.encode_queries(TEXTS), (8, 1)), atol=1e-5
    )


def test_spec_brings_the_encoder_back(model_dir: Path, tmp_path: Path) -> None:
    """From JSON, from the same folder or from where the model lies now."""
    encoder = make_encoder(model_dir, query_prefix="query: ", normalize=False)
    spec = json.loads(json.dumps(encoder.spec()))
    moved = shutil.copytree(model_dir, tmp_path / "moved")
    for override in (None, str(moved)):
        loaded = load_encoder(spec, folder=tmp_path, override=override, device="cpu", batch_size=2)
        np.testing.assert_allclose(
            loaded.encode_queries(TEXTS), encoder.encode_queries(TEXTS), atol=1e-5
        )
        assert loaded.spec() == spec | {"model": override or str(model_dir)}


@pytest.mark.parametrize("name", ["nobody/no-such-model", "/no/such/folder", "empty", "no_model"])
def test_what_is_no_model_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One line that names it, whatever the libraries raise."""
    # the variable is read at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    shutil.copytree(
        model_dir, tmp_path / "no_model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    path = tmp_path / name if name in ("empty", "no_model") else name
    with pytest.raises(RetrievalError, match=str(path)) as caught:
        make_encoder(path)
    assert "\n" not in str(caught.value)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install, not a traceback."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "sentence_transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RetrievalError, match="encoders extra"):
        make_encoder("any")
