"""BERTScore with a tiny random BERT."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from eval.errors import CommandError
from eval.quality.bert_score import BertScore

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += ["red", "green", "blue", "sky", "sea", "the", "is", "."]
ANSWERS = ["the red sky .", "blue", "sea is green", "the sea is the blue sky ."]
REFERENCES = ["red", "the blue sky is red .", "green sea", "sky is blue"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def test_equals_the_slow_way(encoder: Path) -> None:
    scorer = BertScore(encoder)

    def vectors(text: str) -> list[torch.Tensor]:
        inputs = scorer._tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            states = scorer._model(**inputs).last_hidden_state[0, 1:-1]
        return [state / state.norm() for state in states]

    for answer, reference in zip(ANSWERS, REFERENCES, strict=True):
        a, b = vectors(answer), vectors(reference)
        precision = sum(max(float(x @ y) for y in b) for x in a) / len(a)
        recall = sum(max(float(x @ y) for x in a) for y in b) / len(b)
        value = scorer.score(answer, [reference])
        assert value == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-5)
        assert value == pytest.approx(scorer.score(reference, [answer]), abs=1e-5)
        assert scorer.score(answer, [answer]) == pytest.approx(1.0, abs=1e-5)


def test_empty_and_long_texts(encoder: Path) -> None:
    scorer = BertScore(encoder)
    assert scorer.spec()["encoder"] == encoder.name
    assert scorer.score("red " * 100, ["red " * 200]) == pytest.approx(1.0, abs=1e-5), "cut"
    assert [scorer.score(*pair) for pair in (("", ["red"]), ("", [""]), ("red", [""]))] == [0, 1, 0]


def test_what_is_no_encoder_is_said(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="it has no config"):
        BertScore(tmp_path)
