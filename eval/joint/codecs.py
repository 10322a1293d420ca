"""KV of the store in fewer bytes: what do codecs save, how far do they err, what do they take, and
what becomes of the answers?

    python -m eval codecs [--quick]
    python -m eval codecs --questions 0 --timed-tokens 0 --stores RUN ...   bytes of what fused
                                                                            replays have stored

dedup   keys or values of a token in a layer once where they are the first variant's, bit by bit
intB    each number in B bits (sglang_chunkcache/storage/codec.py, eval/joint/any_bits.py), each
        variant of a chunk by itself

Tables: bytes over those of plain KV for `--variants` variants of a chunk, and the relative error of
a token's keys and values in a head, mean and largest, by layer. Linked questions, answered from a
prompt whose chunks have gone through a codec, each behind the chunks of this very prompt: what
differs from the answer over the prompt's own KV is the codec's doing. KL is per token of that
answer, in nats. Times are those of one variant of a chunk with the KV of Llama-3-8B, random, over
those of copying it out of the pool (`encode`) and into the pool (`decode`), which the store does as
well.

`--stores` takes runs of `python -m eval replay --reuse fused`. A chunk with n variants there takes
the bytes of a first one and of n - 1 further ones, as measured on the bundled model's KV.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.bench.relocate import SHAPES, Bench
from eval.errors import CommandError
from eval.joint.any_bits import quantized
from eval.joint.kv import Cached, ModelKv
from eval.joint.units import Sizes, variants
from eval.outcome import Row, add_out_option, open_run, table, tell
from eval.progress import tracked
from eval.recorded import grouped, read_recorded
from eval.run import Sample
from eval.world.kinds import KINDS
from eval.world.tokenizer import turn_pieces
from eval.world.world import World
from retrieval.command_line import Parser
from sglang_chunkcache.bundled_model import model_dir

PLAIN_BITS = (8, 6, 5, 4, 3)
MAX_ANSWER = 32
"""Tokens."""
TIMED = 512
"""Tokens of all variants whose times are told."""
TAKEN = 5
"""Times; the best counts."""


STORES = "Stores of replays, bytes over those of plain KV"
ONE_EACH = "one variant a chunk"


class Setting(NamedTuple):
    """One way to keep the variants of a chunk."""

    name: str

    @property
    def cell(self) -> Row:
        return {"codec": self.name}

    def kept(self, keys: Tensor, values: Tensor) -> tuple[int, Callable[[], tuple[Tensor, Tensor]]]:
        """(bytes of these variants, [num_variants, num_layers, num_tokens, ..],
        what decodes them)."""
        if self.name in ("none", "dedup"):
            again = sum(map(_bytes_again, (keys, values))) if self.name == "dedup" else 0
            return keys.nbytes + values.nbytes - again, lambda: (keys, values)
        codec = quantized(int(self.name.removeprefix("int")))
        # A codec takes each token of a layer by itself, so variants can be further layers.
        parts = codec.encode(keys.flatten(0, 1), values.flatten(0, 1))

        def decoded() -> tuple[Tensor, Tensor]:
            found = codec.decode(parts)
            return found[0].view_as(keys), found[1].view_as(values)

        return sum(each.nbytes for each in parts), decoded


PLAIN = [Setting("none"), *(Setting(f"int{bits}") for bits in PLAIN_BITS)]
"""Whose errors are told by layer, whose times, and what becomes of answers."""
SETTINGS = [*PLAIN, Setting("dedup")]
SAID = [Setting("int8"), Setting("int4")]
"""Of the verdict."""
STORED = [Setting("dedup"), Setting("int8"), Setting("int4")]
"""Whose bytes are told of replays' stores."""


def taken(setting: Setting, keys: Tensor, values: Tensor) -> Row:
    """Bytes and errors of the variants of one chunk."""
    num_bytes, decoded = setting.kept(keys, values)
    plain = keys.nbytes + values.nbytes
    metrics = {"bytes": num_bytes / plain}
    if setting in STORED:
        # A replay's chunks differ in their number of variants, so `_stored` needs these apart.
        alone, first = plain / len(keys), setting.kept(keys[:1], values[:1])[0]
        metrics |= {"first": first / alone, "further": (num_bytes - first) / (plain - alone)}
    for name, before, after in zip(("key", "value"), (keys, values), decoded(), strict=True):
        norm = torch.linalg.vector_norm
        # `vector_norm` returns its input's dtype, and bfloat16 has less than three digits.
        errors = norm(after.float() - before.float(), dim=-1) / norm(before.float(), dim=-1)
        metrics |= {
            f"{name} {layer}": float(errors[:, layer].mean()) for layer in range(errors.shape[1])
        }
        metrics |= {
            f"{name} {layer} largest": float(errors[:, layer].max())
            for layer in range(errors.shape[1])
        }
    return {name: float(f"{each:.4g}") for name, each in metrics.items()}


class Asked(NamedTuple):
    """A linked question over a prompt, with other orders of the same passages."""

    prompt: Cached
    tail: list[int]
    answer: list[int]
    log_probs: Tensor
    """[len(answer), vocab_size]: over the prompt's own KV."""
    chunks: list[tuple[Tensor, Tensor]]
    """Of each chunk the variants: [num_variants, num_layers, num_tokens, ..],
    the prompt's own the last."""


def asked(model: ModelKv, rng: random.Random, num_passages: int, num_variants: int) -> Asked:
    world = World(rng.getrandbits(48) | 1 << 60, links=True)  # beyond the seeds that training draws
    question, passages, _ = KINDS["linked"].draw(world, num_passages, rng)
    orders = [_other_order(num_passages, rng) for _ in range(num_variants - 1)]
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in passages]
    # The given order comes last: `prompt` and each chunk's last variant are the question's.
    for order in [*orders, list(range(num_passages))]:
        head, pieces, tail = turn_pieces(
            [passages[i].text for i in order], question.question, opens=True
        )
        prompt = model.cached([head, *pieces])
        for place, i in enumerate(order):
            found[i].append(model.stored(prompt, prompt.spans[1 + place]))
    ids, answer = model.answer(prompt, tail, max_tokens=MAX_ANSWER)
    # A row is of the token after it: the tail's last one tells the answer's first token.
    log_probs = model.log_probs(prompt, [*ids, *answer])[len(ids) - 1 : -1]
    chunks = [
        (torch.stack(keys), torch.stack(values))
        for keys, values in (zip(*each, strict=True) for each in found)
    ]
    return Asked(prompt, ids, answer, log_probs, chunks)


def answered(model: ModelKv, setting: Setting, of: Asked) -> Row:
    """What becomes of the answer where the prompt's chunks have gone through a codec."""
    for span, kv in zip(of.prompt.spans[1:], of.chunks, strict=True):
        keys, values = setting.kept(*kv)[1]()
        # Overwrites the prompt's own KV, which `of.chunks` still has for the next setting.
        model.restore(of.prompt, span, (keys[-1].contiguous(), values[-1].contiguous()))
    found = model.log_probs(of.prompt, [*of.tail, *of.answer])[len(of.tail) - 1 : -1]
    kl = (of.log_probs.exp() * (of.log_probs - found)).sum(-1).mean()
    equal = found.argmax(-1).tolist() == of.answer
    # Rounding can make the KL of equal distributions slightly negative.
    return {"equal": float(equal), "kl": float(f"{max(0.0, float(kl)):.4g}")}


def timed(
    settings: Sequence[Setting], num_variants: int, num_tokens: int
) -> Iterator[tuple[Setting, Row]]:
    """Seconds of encoding and decoding over those of the copies."""
    pool = Bench("llama3-8b", num_tokens, "contiguous", torch.device("cpu"))

    def read() -> list[Tensor]:
        return [buffer[pool.source] for buffer in pool.buffers]

    def write(kv: Sequence[Tensor]) -> None:
        for buffer, rows in zip(pool.buffers, kv, strict=True):
            buffer[pool.target] = rows
        pool.turn(use_kernel=False)

    copies = {"encode": _best(read), "decode": _best(partial(write, read()))}
    layers, *head = SHAPES["llama3-8b"]
    shape = (2, num_variants, layers, num_tokens // num_variants, *head)
    generator = torch.Generator().manual_seed(0)
    base = torch.randn((2, 1, *shape[2:]), generator=generator)
    keys, values = (base + 0.2 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    for setting in settings:
        decoded = setting.kept(keys, values)[1]
        # Both are called before the loop goes on, so the lambda sees this round's setting.
        found = {"encode": _best(lambda: setting.kept(keys, values)), "decode": _best(decoded)}  # noqa: B023
        yield setting, {name: round(each / copies[name], 2) for name, each in found.items()}


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """One row a setting, and one a codec."""
    by_arm = dict(grouped(samples, itemgetter("arm")))
    rows: dict[str, Row] = {}
    errors: dict[str, Row] = {}
    for arm in ("kept", "answers", "times"):
        for name, ones in grouped(by_arm.get(arm, []), lambda one: str(one["cell"])):
            row = rows.setdefault(name, {**ones[0]["cell"]})
            means = {key: mean(one["metrics"][key] for one in ones) for key in ones[0]["metrics"]}
            if arm == "kept":
                row |= {
                    key: round(means[key], 4)
                    for key in ("bytes", "first", "further")
                    if key in means
                }
                row |= {side: _short(mean(_layers(means, side))) for side in ("key", "value")}
                # `dedup` keeps every bit, so it has no errors to tell.
                if ones[0]["cell"] in [each.cell for each in PLAIN]:
                    errors[name] = {
                        **ones[0]["cell"],
                        **{f"{side}s": _by_layer(ones, side) for side in ("key", "value")},
                    }
            elif arm == "answers":
                largest = max(one["metrics"]["kl"] for one in ones)
                row |= {
                    "equal": round(means["equal"], 3),
                    "KL": _short(means["kl"]),
                    "KL largest": _short(largest),
                }
            else:
                row |= means
    num = max(
        (len(ones) for _, ones in grouped(by_arm.get("answers", []), lambda one: str(one["cell"]))),
        default=0,
    )
    shown = {
        f"Bytes, mean relative errors, answers to {num} questions, times over the copies'": (rows),
        "Relative error of a token in a head, by layer: mean (largest)": errors,
        STORES: {one["cell"]["store"]: _stored(one, rows) for one in by_arm.get("stores", [])},
    }
    said = [
        f"{setting.name}: {row['bytes']:.3f} of the bytes, {row['equal']:.3f} of {num} answers"
        f" stay, KL {row['KL']:g}."
        for setting in SAID
        if "KL" in (row := rows.get(str(setting.cell), {}))
    ]
    said += [
        f"{row['store']}: {row['a chunk']:.2f} variants a chunk,"
        f" {', '.join(f'{each.name} {row[each.name]:.3f}' for each in STORED if each.name in row)}"
        " of the bytes."
        for row in shown[STORES].values()
    ]
    return {
        "verdict": said,
        "tables": [table(title, list(each.values())) for title, each in shown.items() if each],
    }


def main(argv: Sequence[str]) -> int:
    """Measure what is missing and print."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    sizes = Sizes(args.variants, chunks=4, requests=1, passages=2)
    stores, model = read_stores(args.stores), ModelKv(args.model_path)
    with open_run("codecs", args, summarize) as run:

        def missing(arm: str, settings: Sequence[Setting], number: int) -> list[Setting]:
            return [each for each in settings if _key(arm, each, number) not in run]

        def keep(arm: str, number: int, found: Iterable[tuple[Setting, Row]]) -> None:
            for setting, metrics in found:
                sample = {
                    "arm": arm,
                    "cell": setting.cell,
                    "request": str(number),
                    "metrics": metrics,
                }
                run.add(_key(arm, setting, number), sample)

        for number in tracked("variants of chunks", range(args.draws)):
            if settings := missing("kept", SETTINGS, number):
                # A generator for each number: a continued run draws the same.
                drawn = variants(model, random.Random(f"{args.seed} {number}"), sizes)
                keys, values = (
                    torch.stack(each.chunk(args.variants, 1)) for each in (drawn.keys, drawn.values)
                )
                keep("kept", number, ((each, taken(each, keys, values)) for each in settings))
        for number in tracked("questions", range(args.questions)):
            if settings := missing("answers", PLAIN, number):
                of = asked(
                    model,
                    random.Random(f"{args.seed} asked {number}"),
                    args.passages,
                    args.variants,
                )
                keep("answers", number, ((each, answered(model, each, of)) for each in settings))
        if settings := missing("times", PLAIN if args.timed_tokens else (), 0):
            keep("times", 0, timed(settings, args.variants, args.timed_tokens))
        # `add_all` refuses a key that is there, as after an interrupted run.
        by_key = {f"stores/{one['cell']['store']}": one for one in stores}
        run.add_all((key, one) for key, one in by_key.items() if key not in run)
    tell(run)
    return 0


def read_stores(folders: Sequence[Path]) -> list[Sample]:
    """What the fused replays of these runs have stored at their ends.

    Raises:
        CommandError: a run that is none, or without exactly one fused replay.
    """
    found = []
    for folder in folders:
        run = read_recorded(folder)
        fused = [each for each in run.results.get("fused", ()) if each.get("variants")]
        if len(fused) != 1:
            raise CommandError(
                f"{run.name}: --stores takes runs of one `python -m eval replay --reuse fused`"
                f" cell, got {len(fused)}"
            )
        facts = {"arm": "stores", "cell": {"store": run.name}, "request": run.name, "metrics": {}}
        found.append({**facts, "variants": fused[0]["variants"]})
    return found


# Private, in order of use


def _key(arm: str, setting: Setting, number: int) -> str:
    return "/".join(map(str, (arm, *setting, number)))


def _other_order(num: int, rng: random.Random) -> list[int]:
    """In which nothing follows what it follows in 0, 1, 2, ..."""
    while True:
        order = rng.sample(range(num), num)
        # -1 is the head: what comes first in the question's prompt comes first in no other.
        if all(after != before + 1 for before, after in pairwise([-1, *order])):
            return order


def _best(work: Callable[[], object]) -> float:
    found = []
    for _ in range(TAKEN):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    # Other processes only add time, so the shortest one is nearest to the work's own.
    return min(found)


def _layers(metrics: Mapping[str, float], side: str, suffix: str = "") -> list[float]:
    # Each layer has several metrics, so there are fewer layers than metrics.
    names = [f"{side} {layer}{suffix}" for layer in range(len(metrics))]
    return [metrics[name] for name in names if name in metrics]


def _bytes_again(variants: Tensor) -> int:
    """Of [num_variants, num_layers, num_tokens, ..] the tokens in a layer that are the first
    variant's, bit by bit."""
    again = (variants[1:] == variants[0]).flatten(-2).all(-1)
    return int(again.sum()) * variants[0, 0, 0].nbytes


def _by_layer(ones: Sequence[Sample], side: str) -> str:
    found = [_layers(one["metrics"], side) for one in ones]
    largest = [_layers(one["metrics"], side, " largest") for one in ones]
    by_layer = zip(zip(*found, strict=True), zip(*largest, strict=True), strict=True)
    return " ".join(f"{mean(each):.3f} ({max(most):.3f})" for each, most in by_layer)


def _stored(store: Sample, rows: Mapping[str, Row]) -> Row:
    """A replay's store by each codec."""
    # JSON has made the numbers of variants strings.
    variants = [(int(num), chunks, mib) for num, (chunks, mib) in store["variants"].items()]
    plain = sum(num * mib for num, _, mib in variants)
    counts = {
        "chunks": sum(chunks for _, chunks, _ in variants),
        "variants": sum(num * chunks for num, chunks, _ in variants),
    }
    shares = {ONE_EACH: (1.0, 0.0)} | {
        each.name: (rows[str(each.cell)]["first"], rows[str(each.cell)]["further"])
        for each in STORED
        if str(each.cell) in rows
    }
    by_codec = {
        title: round(
            sum(mib * (first + (num - 1) * further) for num, _, mib in variants) / plain, 3
        )
        for title, (first, further) in shares.items()
    }
    a_chunk = round(counts["variants"] / counts["chunks"], 2)
    return {**store["cell"], **counts, "a chunk": a_chunk, "MiB": round(plain, 1), **by_codec}


def _short(number: float) -> float:
    return float(f"{number:.2g}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m eval codecs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--draws", type=int, default=8, help="chunks whose variants are encoded")
    add("--questions", type=int, default=80)
    add("--variants", type=int, default=5, help="of a chunk, this prompt's own included")
    add("--passages", type=int, default=6, help="of a question's prompt; each is a chunk")
    add("--timed-tokens", type=int, default=TIMED, help="of all variants whose coding is timed")
    add(
        "--stores", type=Path, nargs="*", default=[], metavar="RUN", help="folders of fused replays"
    )
    add("--seed", type=int, default=0)
    add("--model-path", type=Path, default=model_dir())
    add("--threads", type=int, default=1)
    add("--quick", action="store_true", help="one chunk, one question: does it run?")
    add_out_option(parser)
    args = parser.parse_args(argv)
    if args.variants < 2:
        raise CommandError(f"--variants must be at least 2, got {args.variants}")
    if args.quick:
        args.draws, args.questions, args.timed_tokens = 1, 1, 10
    return args
