"""BERTScore (Zhang et al. 2020) with an encoder from a local folder: each token is matched with its
most similar one.

The encoder's last layer, without inverse document frequencies and rescaling. Only values of the
same encoder, which the record names, can be compared. [CLS] and [SEP] do not count.

torchmetrics has BERTScore too, but with texts of different lengths in one call it scores answers
against other answers' references (1.9.0: it sorts by length and un-sorts with the same permutation
instead of its inverse; torchmetrics issue 2728). Tests compare ours with it one pair at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.errors import CommandError

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENS = 512
"""Texts are truncated to this many tokens, as by all BERT-like encoders."""


class BertScore:
    """F1 of greedy matching between two texts; each text is encoded once.

    Args:
        folder: a transformers encoder with its tokenizer; nothing is downloaded.
    Raises:
        CommandError: no such encoder.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").exists():
            raise CommandError(
                f"--bert-encoder: {folder} is not the folder of an encoder: it has no config.json"
            )
        from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

        define_torchvision_ops()
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()
        except (OSError, ValueError) as error:
            raise CommandError(f"--bert-encoder: {folder}: {str(error).splitlines()[0]}") from None
        self.name = folder.name
        self._max_tokens = min(MAX_TOKENS, self._model.config.max_position_embeddings)
        self._embedded: dict[str, Tensor] = {}

    def spec(self) -> dict[str, Any]:
        """Encoder and layer, on which the values depend, for the record."""
        return {
            "encoder": self.name,
            "layer": self._model.config.num_hidden_layers,
            "idf": False,
            "rescaled": False,
        }

    def score(self, answer: str, references: Sequence[str]) -> float:
        """The best F1 over the references, at least one, -1 to 1;
        a text without tokens: 0, two of them: 1."""
        return max(match(self._embed(answer), self._embed(text)) for text in references)

    def _embed(self, text: str) -> Tensor:
        """[num_tokens, dim] float32 of length 1 each, without special tokens."""
        import torch

        # Threads share the dict without a lock: at worst a text is encoded twice.
        if text not in self._embedded:
            limits = {"truncation": True, "max_length": self._max_tokens}
            inputs = self._tokenizer(
                text, return_special_tokens_mask=True, return_tensors="pt", **limits
            )
            # Taken out, as the model's forward has no such argument.
            kept = ~inputs.pop("special_tokens_mask")[0].bool()
            with torch.inference_mode():
                states = self._model(**inputs).last_hidden_state[0, kept]
            self._embedded[text] = torch.nn.functional.normalize(states.float(), dim=-1)
        return self._embedded[text]


def match(answer: Tensor, reference: Tensor) -> float:
    """F1 of precision (mean over the answer's tokens of the best similarity) and recall (over the
    reference's).

    Args:
        answer, reference: [num_tokens, dim] of length 1 each; either may have no tokens.
    """
    if not len(answer) or not len(reference):
        return float(len(answer) == len(reference))
    similarity = answer @ reference.T
    precision = float(similarity.max(dim=1).values.mean())
    recall = float(similarity.max(dim=0).values.mean())
    # If both are negative, as between opposite texts, F1 has no meaning; their mean is then
    # negative, too.
    return (
        2 * precision * recall / (precision + recall)
        if min(precision, recall) > 0
        else (precision + recall) / 2
    )
