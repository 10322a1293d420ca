"""Models on disk as encoders and rerankers: random two-layer BERTs with a WordPiece tokenizer."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.__main__ import main
from retrieval.encoder import load_encoder
from retrieval.errors import RetrievalError
from retrieval.hits import Hit
from retrieval.passage import Passage
from retrieval.reranker import Reranker
from retrieval.sentence_encoder import SentenceEncoder, own_prefixes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers")

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["the keeper of the lighthouse", "a storm", "which ship is the harbour of night ?", "zzz"]
WORDS = ["the", "of", "storm", "lighthouse", "harbour", "ship", "who", "query", "passage", ":", "?"]
VOCAB = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
HIDDEN = 32
MAX_TOKENS = 24


def write_model(folder: Path, kind: str = "BertModel", **changes: Any) -> Path:
    """A plain transformers model, as Contriever is published."""
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(VOCAB))
    transformers.BertTokenizerFast(
        vocab={w: i for i, w in enumerate(VOCAB)}, model_max_length=MAX_TOKENS
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(VOCAB),
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.5,
        **changes,
    )
    torch.manual_seed(0)
    getattr(transformers, kind)(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def make_encoder(path: Path | str, **changes: Any) -> SentenceEncoder:
    settings = {"query_prefix": None, "passage_prefix": None, "normalize": True, **changes}
    return SentenceEncoder(str(path), device="cpu", batch_size=2, **settings)


def check_near(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-5)


def mean_pooled(path: Path, texts: Sequence[str], *, normalize: bool = True) -> NDArray[np.float32]:
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
        check_near(vectors, expected)


def test_prompts_of_the_model_are_its_prefixes(model_dir: Path, tmp_path: Path) -> None:
    """A model's own need no flags, and flags win over them."""
    from sentence_transformers import SentenceTransformer

    prompts = {"query": "who: ", "passage": "the: "}
    model = SentenceTransformer(str(model_dir), device="cpu", prompts=prompts)
    model.save(str(tmp_path / "prompted"))
    own = make_encoder(tmp_path / "prompted")
    assert (own.query_prefix, own.passage_prefix) == ("who: ", "the: ")
    check_near(own.encode_queries(TEXTS), mean_pooled(model_dir, [f"who: {t}" for t in TEXTS]))
    check_near(own.encode_passages(TEXTS), mean_pooled(model_dir, [f"the: {t}" for t in TEXTS]))
    none = make_encoder(tmp_path / "prompted", query_prefix="", passage_prefix="")
    check_near(none.encode_queries(["ship"]), mean_pooled(model_dir, ["ship"]))


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
        ("e5-base-v2/other", {}, ("", "")),
    ],
)
def test_own_prefixes(name: str, prompts: dict[str, str], expected: tuple[str, str]) -> None:
    """Configured prompts first, then what is published for exactly that name."""
    assert own_prefixes(name, prompts) == expected


def test_published_prefix_reaches_an_encoder_by_its_folder(tmp_path: Path) -> None:
    """A downloaded E5 keeps its name as its folder's."""
    spec = make_encoder(write_model(tmp_path / "e5-small-v2")).spec()
    assert (spec["query_prefix"], spec["passage_prefix"]) == ("query: ", "passage: ")


def test_long_text_is_cut_at_max_tokens(model_dir: Path) -> None:
    encoder = make_encoder(model_dir)
    assert encoder.spec()["max_tokens"] == MAX_TOKENS
    text = "the storm " * MAX_TOKENS
    short, long = encoder.encode_passages([text, text + "lighthouse"])
    check_near(long, short)


def test_odd_texts_give_finite_vectors(model_dir: Path) -> None:
    """One broken passage must not stop a build of millions."""
    encoder = make_encoder(model_dir)
    vectors = encoder.encode_passages(["", "\ud800", "\x00", "東京 🙂"])
    assert vectors.shape == (4, HIDDEN)
    assert np.isfinite(vectors).all()
    assert encoder.encode_passages([]).shape == (0, HIDDEN)


def test_threads_share_an_encoder(model_dir: Path) -> None:
    """A fast tokenizer used by two at once raises."""
    encoder = make_encoder(model_dir)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda text: encoder.encode_queries([text])[0], TEXTS * 8))
    check_near(np.vstack(rows), np.tile(encoder.encode_queries(TEXTS), (8, 1)))


def test_spec_brings_the_encoder_back(model_dir: Path, tmp_path: Path) -> None:
    """From JSON, from the same folder or from where the model lies now."""
    encoder = make_encoder(model_dir, query_prefix="query: ", normalize=False)
    spec = json.loads(json.dumps(encoder.spec()))
    moved = shutil.copytree(model_dir, tmp_path / "moved")
    for override in (None, str(moved)):
        loaded = load_encoder(spec, folder=tmp_path, override=override, device="cpu", batch_size=2)
        check_near(loaded.encode_queries(TEXTS), encoder.encode_queries(TEXTS))
        assert loaded.spec() == spec | {"model": override or str(model_dir)}


@pytest.mark.parametrize("name", ["nobody/no-such-model", "/no/such/folder", "empty", "no_model"])
def test_what_is_no_model_is_refused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # the variable is read at import
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    without = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(model_dir, tmp_path / "no_model", ignore=without)
    path = tmp_path / name if name in ("empty", "no_model") else name
    with pytest.raises(RetrievalError, match=str(path)) as caught:
        make_encoder(path)
    assert "\n" not in str(caught.value)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(RetrievalError, match="encoders extra"):
        make_encoder("any")


# Rerankers

CROSS_ENCODER = "BertForSequenceClassification"


def hits_of(texts: Sequence[str], title: str = "") -> list[Hit]:
    """As a first stage ranks them."""
    passages = [Passage(str(i), str(i), title, text, 0, 1, 1) for i, text in enumerate(texts)]
    return [Hit(passage, 1 / (i + 1), "dense") for i, passage in enumerate(passages)]


def test_reranker_equals_one_pair_at_a_time(tmp_path: Path) -> None:
    """Padding in a batch must not count; texts are cut; odd ones stop no request."""
    path = write_model(tmp_path / "cross", CROSS_ENCODER, num_labels=1)
    texts = [*TEXTS, "the storm " * MAX_TOKENS, "", "\ud800"]
    hits = hits_of(texts, title="ship")
    found = Reranker(str(path), device="cpu").rerank("who ?", hits, k=len(texts))

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    slow = []
    for hit in hits:
        text = hit.passage.content.replace("\ud800", "?")
        ids = tokenizer("who ?", text, return_tensors="pt", truncation=True, max_length=MAX_TOKENS)
        with torch.no_grad():
            slow.append(float(model(**ids).logits[0, 0].sigmoid()))
    assert len({round(score, 4) for score in slow}) == len(texts), "else any order would pass"
    order = sorted(range(len(texts)), key=lambda i: -slow[i])
    assert [int(hit.passage.id) for hit in found] == order
    np.testing.assert_allclose([hit.score for hit in found], sorted(slow)[::-1], atol=1e-5)
    assert {hit.mode for hit in found} == {"rerank"}
    assert Reranker(str(path), device="cpu").rerank("who ?", hits, k=2) == found[:2]


def test_search_command_reranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reranker of the command reads `--rerank-depth` times k passages."""
    pytest.importorskip("faiss")
    from tests.retrieval.small_index import build, make_documents

    path = write_model(tmp_path / "cross", CROSS_ENCODER, num_labels=1)
    build(tmp_path / "index", make_documents([f"the {word} ship" for word in WORDS]), encoder=None)
    command = ["search", str(tmp_path / "index"), "the", "ship", "--device", "cpu", "--json"]

    def search(*flags: str) -> dict[str, Any]:
        assert main([*command, *flags]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    first = search("--k", "6")["passages"]
    told = search("--k", "2", "--reranker", str(path), "--rerank-depth", "3")
    hits = hits_of([row["text"] for row in first])
    best = Reranker(str(path), device="cpu").rerank("the ship", hits, k=2)
    wanted = [(first[int(hit.passage.id)]["id"], "rerank") for hit in best]
    assert [(row["id"], row["mode"]) for row in told["passages"]] == wanted
    assert "rerank" in told["ms"]


@pytest.mark.parametrize(
    ("kind", "labels", "reason"),
    [("BertModel", 1, "no cross-encoder.*BertModel"), (CROSS_ENCODER, 3, "gives 3 scores a pair")],
)
def test_model_that_is_no_reranker_is_refused(
    tmp_path: Path, kind: str, labels: int, reason: str
) -> None:
    """sentence-transformers gives an encoder a random head, whose order means nothing."""
    path = write_model(tmp_path / "other", kind, num_labels=labels)
    with pytest.raises(RetrievalError, match=reason):
        Reranker(str(path), device="cpu")
    with pytest.raises(RetrievalError, match=r"cannot load .* as a CrossEncoder"):
        Reranker(str(tmp_path), device="cpu")
    with pytest.raises(RetrievalError, match="no such file or folder"):
        Reranker(str(tmp_path / "none"), device="cpu")
