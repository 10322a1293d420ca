"""Tokenizers made on the fly, one of each kind that matters:
byte-level, and sentencepiece-like with a leading space."""

from __future__ import annotations

import json
import random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{"
    " message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL_TOKENS = ["<s>", "<|im_start|>", "<|im_end|>", "<pad>"]


def make_tokenizer(vocab_size: int = 512) -> Any:
    """A byte-level BPE tokenizer trained on generated words."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(generated_lines(2000), trainer)
    return _wrap(bpe)


def make_spaced_tokenizer(vocab_size: int = 512) -> Any:
    """Llama's kind: puts a space in front of whatever it is given, falls back to bytes."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", *SPECIAL_TOKENS], show_progress=False
    )
    bpe.train_from_iterator(
        (word for line in generated_lines(300) for word in line.split()), trainer
    )
    state = json.loads(bpe.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    state["model"]["byte_fallback"] = True
    bpe = Tokenizer.from_str(json.dumps(state))
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrap(bpe)


def make_unigram_tokenizer(vocab_size: int = 512) -> Any:
    """SentencePiece's other kind, with byte fallback;
    control tokens are pieces of the model, too."""
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", *SPECIAL_TOKENS], unk_token="<unk>"
    )
    trainer.show_progress = False
    unigram.train_from_iterator(
        (word for line in generated_lines(300) for word in line.split()), trainer
    )
    state = json.loads(unigram.to_str())
    state["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    state["model"]["byte_fallback"] = True
    unigram = Tokenizer.from_str(json.dumps(state))
    unigram.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrap(unigram)


def _wrap(backend: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


def generated_lines(num_lines: int) -> list[str]:
    """Pseudo-random sentences of made-up words, the same on every run."""
    rng = random.Random(0)
    syllables = [
        a + b
        for a in "bcdfghklmnprstvz"
        for b in ("a", "e", "i", "o", "u", "an", "er", "is", "or", "um")
    ]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(1500)]
    return [" ".join(rng.choices(words, k=12)).capitalize() + "." for _ in range(num_lines)]
