"""Exact match of the bundled model on worlds it was not trained on, through stock transformers, greedily.

    python -m eval bench bundled-model [--model-path DIR] [--chunks 2 4 6] [--questions 200]

Each question comes with its gold passages and distractors of the same kinds, shuffled. `order` are questions about the passages'
order (first, last), `linked` those about facts told without a name, in `World.linked_context`. Exact match wants the whole
answer: every sentence of it, nothing else. By chance: what a random passage of the gold one's kind would reach, for two-hop
questions after a right first hop.
"""

import argparse
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from eval.outcome import add_out_option, open_run, table, tell
from eval.run import Sample
from eval.world.tokenizer import turn_pieces
from eval.world.world import Passage, Question, World, linked_questions, order_questions
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()  # must run before transformers is imported

from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

MAX_NEW_TOKENS = 40
BATCH_SIZE = 20
HOPS = {1: "one hop", 2: "two hops", 0: "order", -1: "linked"}


class Asked(NamedTuple):
    """A question, its context in the order the model reads it, and what the model answered."""

    question: Question
    passages: Sequence[Passage]
    answer: str

    @property
    def right(self) -> bool:
        return self.answer == self.question.answers[0]

    @property
    def sample(self) -> Sample:
        """Exact match, and the wrong answer."""
        wrong = {"question": self.question.question, "answer": self.answer, "right": self.question.answers[0]}
        return {"metrics": {"em": float(self.right)}, "wrong": None if self.right else wrong}


@torch.inference_mode()
def ask(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, drawn: Sequence[tuple[Question, Sequence[Passage]]]
) -> list[Asked]:
    """Answer one batch greedily, padded on the left; each piece of a prompt is tokenised apart."""
    prompts = []
    for question, passages in drawn:
        head, pieces, tail = turn_pieces([passage.text for passage in passages], question.question, opens=True)
        encoded = [tokenizer.encode(piece, add_special_tokens=False) for piece in (head, *pieces, tail)]
        prompts.append([*chain.from_iterable(encoded)])
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
) -> list[Asked]:
    """Ask questions from a fresh full-size world for every batch."""
    rng = random.Random(seed)
    asked: list[Asked] = []
    while len(asked) < num_questions:
        world = World(rng.getrandbits(48) | 1 << 60, links=hop == -1)  # beyond the seeds that training draws
        asked += ask(model, tokenizer, _draw(world, hop, num_chunks, min(BATCH_SIZE, num_questions - len(asked)), rng))
    return asked


def _draw(
    world: World, hop: int, num_chunks: int, num_questions: int, rng: random.Random
) -> list[tuple[Question, Sequence[Passage]]]:
    if hop == -1:
        drawn: list[tuple[Question, Sequence[Passage]]] = []
        for _ in range(num_questions):
            passages = world.linked_context(num_chunks, rng)
            told = {passage.id for passage in passages[1::2]}
            drawn.append(
                (rng.choice([q for q in linked_questions(passages) if q.gold_passage_ids[1] in told]), passages)
            )
        return drawn
    questions = rng.sample([q for q in world.questions if q.hop == (hop or 1)], num_questions)
    contexts = [world.context(question, num_chunks, rng) for question in questions]
    if hop == 0:
        # First and last; "after" is beyond the model, see sglang_chunkcache/bundled_model/README.md.
        questions = [rng.choice(order_questions(passages)[:2]) for passages in contexts]
    return list(zip(questions, contexts, strict=True))


def load(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Model and tokenizer as stock transformers loads them, in the weights' own bfloat16."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    return model, AutoTokenizer.from_pretrained(path)


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Exact match of each kind of question and number of passages, and the wrong answers."""
    groups: dict[tuple[int, str], list[Sample]] = {}
    for one in samples:
        groups.setdefault((one["cell"]["passages"], one["cell"]["questions"]), []).append(one)
    rows = []
    for (passages, questions), taken in groups.items():
        rivals = passages // 2 if questions in (HOPS[2], HOPS[-1]) else passages
        right = mean(one["metrics"]["em"] for one in taken)
        row = {"passages": passages, "questions": questions, "n": len(taken), "exact match": round(right, 3)}
        rows.append({**row, "by chance": round(1 / rivals, 3)})
    wrong = [{**one["cell"], **one["wrong"]} for one in samples if one["wrong"]]
    tables = [table("Exact match in worlds that training never saw", rows), table("Wrong answers", wrong[:20])]
    said = [
        f"{row['passages']} passages, {row['questions']}: {row['exact match']:.3f} of {row['n']} right." for row in rows
    ]
    return {"verdict": said, "tables": [one for one in tables if one["rows"]]}


def main(argv: Sequence[str]) -> int:
    """Ask what is missing and print."""
    parser = argparse.ArgumentParser(
        prog="python -m eval bench bundled-model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", type=Path, default=model_dir())
    add("--chunks", type=int, nargs="+", default=[2, 4, 6], help="passages in the context")
    add("--questions", type=int, default=200, help="per kind and number of chunks")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add_out_option(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model_path)
    with open_run("bundled-model", args, summarize) as run:
        for num_chunks in args.chunks:
            for hop, kind in HOPS.items():
                if f"{num_chunks}/{kind}/0" in run:
                    continue
                sizes = {"num_chunks": num_chunks, "num_questions": args.questions, "seed": args.seed}
                asked = evaluate(model, tokenizer, hop=hop, **sizes)
                about = {"arm": "bundled-model", "cell": {"passages": num_chunks, "questions": kind}}
                run.add_all(
                    (f"{num_chunks}/{kind}/{i}", about | {"request": str(i)} | one.sample)
                    for i, one in enumerate(asked)
                )
    tell(run)
    return 0
