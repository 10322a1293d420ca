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
from typing import Any

import torch

from eval.bench.rounds import by_cell
from eval.outcome import add_out_option, open_run, table, tell
from eval.run import Sample
from eval.world.tokenizer import turn_pieces
from eval.world.world import Passage, Question, World, linked_questions, order_questions
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()  # must run before transformers is imported

from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402

MAX_NEW_TOKENS = 40
BATCH_SIZE = 20
HOPS = {"one hop": 1, "two hops": 2, "order": 0, "linked": -1}
Drawn = tuple[Question, Sequence[Passage]]
"""A question and its context in the order the model reads it."""


class BundledModel:
    """Model and tokenizer as stock transformers loads them, in the weights' own bfloat16."""

    def __init__(self, path: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)

    def samples(self, kind: str, num_chunks: int, num_questions: int, *, seed: int = 0) -> list[Sample]:
        """Exact match, and the wrong answer, of questions from fresh full-size worlds, one for every batch."""
        rng, samples = random.Random(seed), list[Sample]()
        while len(samples) < num_questions:
            world = World(rng.getrandbits(48) | 1 << 60, links=kind == "linked")  # beyond the seeds that training draws
            drawn = _draw(world, kind, num_chunks, min(BATCH_SIZE, num_questions - len(samples)), rng)
            for (question, _), answer in zip(drawn, self._answers(drawn), strict=True):
                is_right = answer == question.answers[0]
                wrong = {"question": question.question, "answer": answer, "right": question.answers[0]}
                samples.append({"metrics": {"em": float(is_right)}, "wrong": None if is_right else wrong})
        return samples

    @torch.inference_mode()
    def _answers(self, drawn: Sequence[Drawn]) -> list[str]:
        """Answer one batch greedily, padded on the left; each piece of a prompt is tokenised apart."""
        prompts = []
        for question, passages in drawn:
            head, pieces, tail = turn_pieces([passage.text for passage in passages], question.question, opens=True)
            encoded = [self._tokenizer.encode(piece, add_special_tokens=False) for piece in (head, *pieces, tail)]
            prompts.append({"input_ids": [*chain.from_iterable(encoded)]})
        batch = self._tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
        out = self._model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers = self._tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return list(answers)


def _draw(world: World, kind: str, num_chunks: int, num_questions: int, rng: random.Random) -> list[Drawn]:
    if kind == "linked":
        drawn: list[Drawn] = []
        for _ in range(num_questions):
            passages = world.linked_context(num_chunks, rng)
            told = {passage.id for passage in passages[1::2]}
            asked = [q for q in linked_questions(passages) if q.gold_passage_ids[1] in told]
            drawn.append((rng.choice(asked), passages))
        return drawn
    questions = rng.sample([q for q in world.questions if q.hop == (HOPS[kind] or 1)], num_questions)
    contexts = [world.context(question, num_chunks, rng) for question in questions]
    if kind == "order":
        # First and last; "after" is beyond the model, see sglang_chunkcache/bundled_model/README.md.
        questions = [rng.choice(order_questions(passages)[:2]) for passages in contexts]
    return list(zip(questions, contexts, strict=True))


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Exact match of each kind of question and number of passages, and the wrong answers."""
    rows = []
    for cell, arms in by_cell(samples):
        taken = arms["bundled-model"]
        rivals = cell["passages"] // (2 if cell["questions"] in ("two hops", "linked") else 1)
        right = round(mean(one["metrics"]["em"] for one in taken), 3)
        rows.append({**cell, "n": len(taken), "exact match": right, "by chance": round(1 / rivals, 3)})
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
    add_out_option(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model = BundledModel(args.model_path)
    with open_run("bundled-model", args, summarize) as run:
        for num_chunks in args.chunks:
            for kind in HOPS:
                if (name := f"{num_chunks}/{kind}") + "/0" not in run:
                    about = {"arm": "bundled-model", "cell": {"passages": num_chunks, "questions": kind}}
                    taken = model.samples(kind, num_chunks, args.questions)
                    run.add_all((f"{name}/{i}", about | {"request": str(i)} | one) for i, one in enumerate(taken))
    tell(run)
    return 0
