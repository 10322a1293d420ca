"""Exact match of the bundled model on worlds it was not trained on, through stock transformers,
greedily.

    python -m eval bench bundled-model [--model-path DIR] [--chunks 2 4 6] [--questions 200]

One hop, two hops and order (first, last): gold passages and distractors of the same kinds,
shuffled. The others are those of `eval.world.kinds`, where there are enough passages. Exact match
wants the whole answer: every sentence of it, nothing else. By chance: what a random passage that
the wording fits would reach, for two-hop questions after a right first hop.
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
from eval.progress import tracked
from eval.run import Sample
from eval.world.kinds import KINDS, Asked
from eval.world.tokenizer import turn_pieces
from eval.world.world import World, order_questions
from retrieval.command_line import Parser
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()  # must run before transformers is imported

from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402

MAX_NEW_TOKENS = 40
BATCH_SIZE = 20
HOPS = {"one hop": 1, "two hops": 2, "order": 0}
LINKED = ("linked", "linked-2", "linked-3", "contradicted")
"""Of `eval.world.kinds`; its others are those above in other contexts."""


class BundledModel:
    """Model and tokenizer as stock transformers loads them, in the weights' own bfloat16."""

    def __init__(self, path: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)

    def samples(
        self, kind: str, num_chunks: int, num_questions: int, *, seed: int = 0
    ) -> list[Sample]:
        """Exact match, and the wrong answer, of questions from fresh full-size worlds,
        one for every batch."""
        rng, samples = random.Random(seed), list[Sample]()
        while len(samples) < num_questions:
            # beyond the seeds that training draws
            world = World(rng.getrandbits(48) | 1 << 60, links=kind in LINKED)
            drawn = _draw(
                world, kind, num_chunks, min(BATCH_SIZE, num_questions - len(samples)), rng
            )
            for (question, _, num_rivals), answer in zip(drawn, self._answers(drawn), strict=True):
                is_right = answer == question.answers[0]
                wrong = {
                    "question": question.question,
                    "answer": answer,
                    "right": question.answers[0],
                }
                sample = {"metrics": {"em": float(is_right)}, "by_chance": 1 / num_rivals}
                samples.append(sample | {"wrong": None if is_right else wrong})
        return samples

    @torch.inference_mode()
    def _answers(self, drawn: Sequence[Asked]) -> list[str]:
        """Answer one batch greedily, padded on the left;
        each piece of a prompt is tokenised apart."""
        prompts = []
        for question, passages, _ in drawn:
            head, pieces, tail = turn_pieces(
                [passage.text for passage in passages], question.question, opens=True
            )
            encoded = [
                self._tokenizer.encode(piece, add_special_tokens=False)
                for piece in (head, *pieces, tail)
            ]
            prompts.append({"input_ids": [*chain.from_iterable(encoded)]})
        # `generate` goes on from the last column, so that must be each prompt's end.
        batch = self._tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
        out = self._model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers = self._tokenizer.batch_decode(
            out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return list(answers)


def _draw(
    world: World, kind: str, num_chunks: int, num_questions: int, rng: random.Random
) -> list[Asked]:
    if kind in LINKED:
        return [KINDS[kind].draw(world, num_chunks, rng) for _ in range(num_questions)]
    questions = rng.sample(
        [q for q in world.questions if q.hop == (HOPS[kind] or 1)], num_questions
    )
    contexts = [world.context(question, num_chunks, rng) for question in questions]
    if kind == "order":
        # First and last; "after" is beyond the model, see
        # sglang_chunkcache/bundled_model/README.md.
        questions = [rng.choice(order_questions(passages)[:2]) for passages in contexts]
    num_rivals = num_chunks // 2 if kind == "two hops" else num_chunks
    return [Asked(*drawn, num_rivals) for drawn in zip(questions, contexts, strict=True)]


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Exact match of each kind of question and number of passages, and the wrong answers."""
    rows = []
    for cell, arms in by_cell(samples):
        taken = arms["bundled-model"]
        right = round(mean(one["metrics"]["em"] for one in taken), 3)
        chance = round(mean(one["by_chance"] for one in taken), 3)
        rows.append({**cell, "n": len(taken), "exact match": right, "by chance": chance})
    wrong = [{**one["cell"], **one["wrong"]} for one in samples if one["wrong"]]
    tables = [
        table("Exact match in worlds that training never saw", rows),
        table("Wrong answers", wrong[:20]),
    ]
    said = [
        f"{row['passages']} passages, {row['questions']}: {row['exact match']:.3f} of {row['n']}"
        " right."
        for row in rows
    ]
    return {"verdict": said, "tables": [one for one in tables if one["rows"]]}


def main(argv: Sequence[str]) -> int:
    """Ask what is missing and print."""
    parser = Parser(
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
            for kind in tracked(f"{num_chunks} passages", (*HOPS, *LINKED)):
                if kind in KINDS and num_chunks < KINDS[kind].min_passages:
                    continue
                # `add_all` keeps a cell's samples in one write, so the first key stands for all.
                if (name := f"{num_chunks}/{kind}") + "/0" not in run:
                    about = {
                        "arm": "bundled-model",
                        "cell": {"passages": num_chunks, "questions": kind},
                    }
                    taken = model.samples(kind, num_chunks, args.questions)
                    run.add_all(
                        (f"{name}/{i}", about | {"request": str(i)} | one)
                        for i, one in enumerate(taken)
                    )
    tell(run)
    return 0
