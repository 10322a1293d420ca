"""Exact match of the bundled model on worlds it was not trained on, through stock transformers, greedily.

    python -m eval.world.evaluate [--model-path DIR] [--chunks 4] [--questions 200] [--json]

Each question comes with its gold passages and distractors of the same kinds, shuffled; hop 0 are questions about the
passages' order (first, last), hop -1 those about facts told without a name, in `World.linked_context`. Exact match wants
the whole answer: every sentence of it, nothing else. The guess is what a random passage of the gold one's kind would
reach, for two-hop questions after a right first hop. The last stdout line is one JSON object.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from eval.world.tokenizer import turn_pieces
from eval.world.world import Passage, Question, World, linked_questions, order_questions
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()  # must run before transformers is imported

from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

MAX_NEW_TOKENS = 40
BATCH_SIZE = 20
HOPS = (1, 2, 0, -1)


class Asked(NamedTuple):
    """A question, its context in the order the model reads it, and what the model answered."""

    question: Question
    passages: Sequence[Passage]
    answer: str

    @property
    def right(self) -> bool:
        return self.answer == self.question.answers[0]


class Score(NamedTuple):
    """Exact match of `num_questions` questions of one kind; `guess` is what chance would reach."""

    hop: int
    num_chunks: int
    num_questions: int
    exact_match: float
    guess: float


def prompt_ids(tokenizer: PreTrainedTokenizerFast, passages: Sequence[str], question: str) -> list[int]:
    """The first turn's token ids, each piece tokenised apart."""
    head, pieces, tail = turn_pieces(passages, question, opens=True)
    return [token for piece in (head, *pieces, tail) for token in tokenizer.encode(piece, add_special_tokens=False)]


@torch.inference_mode()
def ask(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, drawn: Sequence[tuple[Question, Sequence[Passage]]]
) -> list[Asked]:
    """Answer one batch greedily, padded on the left."""
    prompts = [prompt_ids(tokenizer, [p.text for p in passages], question.question) for question, passages in drawn]
    longest = max(map(len, prompts))
    pad_id = tokenizer.pad_token_id
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    out = model.generate(
        input_ids=ids, attention_mask=(ids != pad_id).long(), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
    )
    answers = tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
    return [Asked(question, passages, answer) for (question, passages), answer in zip(drawn, answers, strict=True)]


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    hop: int,
    num_chunks: int,
    num_questions: int,
    seed: int,
) -> tuple[Score, list[Asked]]:
    """Draw questions from a fresh full-size world for every batch and score them."""
    rng = random.Random(seed)
    asked: list[Asked] = []
    while len(asked) < num_questions:
        world = World(rng.getrandbits(48) | 1 << 60, links=hop == -1)  # beyond the seeds that training draws
        asked += ask(model, tokenizer, _draw(world, hop, num_chunks, min(BATCH_SIZE, num_questions - len(asked)), rng))
    rivals = num_chunks // 2 if hop in (2, -1) else num_chunks
    return Score(hop, num_chunks, num_questions, sum(a.right for a in asked) / num_questions, 1 / rivals), asked


def _draw(
    world: World, hop: int, num_chunks: int, num_questions: int, rng: random.Random
) -> list[tuple[Question, Sequence[Passage]]]:
    if hop == -1:
        return [_draw_linked(world.linked_context(num_chunks, rng), rng) for _ in range(num_questions)]
    questions = rng.sample([q for q in world.questions if q.hop == (hop or 1)], num_questions)
    contexts = [world.context(question, num_chunks, rng) for question in questions]
    if hop == 0:
        # First and last; "after" is beyond the model, see sglang_chunkcache/bundled_model/README.md.
        questions = [rng.choice(order_questions(passages)[:2]) for passages in contexts]
    return list(zip(questions, contexts, strict=True))


def _draw_linked(passages: Sequence[Passage], rng: random.Random) -> tuple[Question, Sequence[Passage]]:
    told = {passage.id for passage in passages[1::2]}
    return rng.choice([q for q in linked_questions(passages) if q.gold_passage_ids[1] in told]), passages


def load(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Model and tokenizer as stock transformers loads them, in the weights' own bfloat16."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, default=model_dir())
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4, 6], help="passages in the context")
    parser.add_argument("--questions", type=int, default=200, help="per hop and number of chunks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model_path)
    scores = []
    for num_chunks in args.chunks:
        for hop in HOPS:
            score, asked = evaluate(
                model, tokenizer, hop=hop, num_chunks=num_chunks, num_questions=args.questions, seed=args.seed
            )
            scores.append(score)
            if not args.json:
                print(f"{hop}-hop, {num_chunks} chunks: {score.exact_match:.3f} (guess {score.guess:.2f})")
                for wrong in [each for each in asked if not each.right][:3]:
                    print(f"    {wrong.question.question} -> {wrong.answer!r}, not {wrong.question.answers[0]!r}")
    print(json.dumps({"seed": args.seed, "scores": [score._asdict() for score in scores]}))


if __name__ == "__main__":
    main()
