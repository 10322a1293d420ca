"""A SGLang frontend program over retrieved chunks: one context, a question in each branch of a fork, the fates of each.

    python -m sglang_chunkcache.launch_server --model-path bundled          # in another terminal, until it is ready
    python -m eval.frontend_example --url http://127.0.0.1:30000

The program runs twice, the second time with the passages in another order: the server puts them in the order it has cached.
Written for the bundled model; another one needs its own marks in `OPEN` and `CLOSE`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any

from eval.world.world import Passage, Question, World

OPEN, CLOSE = "<|bos|><|user|>\n", "<|end|>\n<|assistant|>\n"
NUM_PASSAGES = 4
NUM_BRANCHES = 3


def main(argv: Sequence[str]) -> int:
    """Run the program twice and print answers and fates; 0 if every branch found its chunks cached."""
    parser = argparse.ArgumentParser(prog="python -m eval.frontend_example", description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="default: %(default)s")
    options = parser.parse_args(argv)

    import sglang as sgl  # takes seconds, which --help need not wait for

    from sglang_chunkcache.lang import ChunkCacheEndpoint, chunks

    @sgl.function  # type: ignore[untyped-decorator]
    def ask_all(s: Any, passages: Sequence[Passage], questions: Sequence[str]) -> None:
        """Every question in a branch of its own, all after the same passages."""
        s += OPEN + chunks([{"id": passage.id, "text": passage.text} for passage in passages])
        s.sync()  # fork() reads the text at once; once it is complete, fork() computes it before the branches start
        branches = s.fork(len(questions))
        for branch, question in zip(branches, questions, strict=True):
            branch += question + CLOSE + sgl.gen("answer", max_tokens=40, temperature=0)
        s["chunkcache"] = [branch.get_meta_info("answer")["chunkcache"] for branch in branches]
        branches.join()  # collects the branches' variables: s["answer"] is a list now

    backend = ChunkCacheEndpoint(options.url)
    passages, questions = _context()
    all_hit = True
    for title, retrieved in (("as retrieved", passages), ("in another order", passages[::-1])):
        state = ask_all.run(passages=retrieved, questions=[q.question for q in questions], backend=backend)
        state.sync()
        if state.error() is not None:
            print(f"failed: {state.error()}", file=sys.stderr)
            return 1
        print(f"passages {title}: {' '.join(passage.id for passage in retrieved)}")
        for question, answer, chunkcache in zip(questions, state["answer"], state["chunkcache"], strict=True):
            fates = chunkcache["fates"]
            all_hit = chunkcache["chunks_hit"] == NUM_PASSAGES and all_hit
            print(f"  {question.question}  {answer.strip()}")
            print(
                f"    order {' '.join(chunkcache['order'])}; {chunkcache['chunks_hit']} chunks cached; "
                f"{fates['exact']} prompt tokens from the cache, {fates['computed']} computed"
            )
    return 0 if all_hit else 1


def _context() -> tuple[list[Passage], list[Question]]:
    world = World(11, num_passages=40)
    first, *others = [q for q in world.questions if q.hop == 1]
    passages = world.context(first, NUM_PASSAGES, random.Random(1))
    shown = {passage.id for passage in passages}
    answerable = [q for q in others if q.gold_passage_ids[0] in shown]
    return passages, [first, *random.Random(1).sample(answerable, NUM_BRANCHES - 1)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
