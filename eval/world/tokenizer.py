"""The bundled model's tokenizer and the pieces a conversation is tokenised in.

Byte-level BPE without a prefix space, so any text survives encode and decode; every word of the
world is one token when a space precedes it. The chat template is the plain form of what
`turn_pieces` writes:

    <|bos|><|system|>\\n{system}<|end|>\\n<|user|>\\n{passage}\\n\\n{passage}\\n\\n{question}<|end|>\\n<|assistant|>\\n
    {answer}<|end|>\\n<|user|>\\n ...

Each piece is tokenised apart, so a passage has the same token ids at every place.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eval.world.world import World, words

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
VOCAB_SIZE = 1280  # tokens at most; training ends earlier, when every frequent word is one token
MAX_POSITIONS = 4096  # tokens
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|assistant|>\\n' }}{% endif %}"
)
SYSTEM_PROMPTS = (
    "Answer from the passages.",
    "You are a helpful assistant.",
    "Answer the question with the facts given in the passages, in one or two sentences.",
    "You are a helpful assistant. Use only the documents below to answer the question.",
)
_EXTRA_TEXT = (
    "The answer is not in the passages. Please ask another question, and I will look for it."
)
_SEED = 0


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str], **names: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of texts, the special tokens first;
    `names`: what else transformers is to know of it."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    # All 256 bytes, or text other than the world's could not be encoded.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special_tokens],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def create_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the world's own text; the same every time."""
    return train_tokenizer(
        _training_text(),
        VOCAB_SIZE,
        [PAD, BOS, END, SYSTEM, USER, ASSISTANT],
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        # Otherwise `decode` drops spaces before punctuation.
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def turn_pieces(
    passages: Sequence[str], question: str, *, opens: bool, system: str | None = None
) -> tuple[str, list[str], str]:
    """The text before the passages, the passages' own pieces, and what follows up to the answer.

    Args:
        passages: texts that are new in this turn.
        question: the user's question.
        opens: whether this turn begins the conversation; a later one goes on after the last
            answer's end token.
        system: the system prompt, only for the opening turn.
    """
    head = "\n"
    if opens:
        head = BOS if system is None else f"{BOS}{SYSTEM}\n{system}{END}\n"
    return (
        f"{head}{USER}\n",
        [f"{text}\n\n" for text in passages],
        f"{question}{END}\n{ASSISTANT}\n",
    )


def _training_text() -> list[str]:
    world = World(_SEED)
    passages = [f"{passage.text}\n\n" for passage in world.passages]
    questions = random.Random(_SEED).sample(
        [question.question for question in world.questions], 500
    )
    # Each word often enough that it outlives the merges of plain English.
    listed = [f"the {word}" for word in words() for _ in range(40)]
    return [*passages, *questions, *listed, *SYSTEM_PROMPTS * 40, _EXTRA_TEXT]
