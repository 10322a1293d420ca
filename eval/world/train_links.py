"""Teach the bundled model facts told without a name: fine-tune it on worlds with links, and write it where it came from.

    python -m eval.world.train_links --minutes 40 --threads 1 [--init DIR] [--out DIR]

"Later the company visited Kelton" is learned in two moves, and neither was found by the loss on answers alone: the value's
token looks for the last passage about a company (`RESOLVE`) and, once the verb of an answer is written, looks for the value
whose company is the one asked about (`LOOK_UP`). Each gets a head of its own that is told where to attend for as long as
training lasts. Between the two halves `_fit_look_up` sets the second head's weights by themselves: it gains nothing from
training until names match, and names match little until it gains.

    1. resolve   heads told where to attend, four and six passages
    2. fit       queries and keys of LOOK_UP to the names that RESOLVE found; values copied from the head that looks up facts
    3. finish    4 to 8 passages, everything, learning rates falling

The old kinds of questions stay in the data throughout.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eval.world.tokenizer import turn_pieces
from eval.world.train import (
    HEAD_DIM,
    HIDDEN_SIZE,
    ROPE_THETA,
    SYSTEM_SHARE,
    Encoder,
    Row,
    create_optimizers,
    descend,
    pad,
    parse_options,
    sample_system_prompt,
    save,
)
from eval.world.world import ENTITY_KINDS, Turn, sample_conversation
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()  # must run before transformers is imported

from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

MUON_LR = 0.01
ADAMW_LR = 1e-3
WARM_UP_STEPS = 20
DECAY_FLOOR = 0.02
LM_WEIGHT = 0.5
VALUE_WEIGHT = 3.0  # of a linked answer's value among the answers' tokens: it is one of six and the only hard one
PASSAGES_PER_STEP = 64
NUM_TURNS = 8
LOG_EVERY = 20  # steps


class Head(NamedTuple):
    """Counted from 0."""

    layer: int
    head: int


RESOLVE = Head(1, 2)  # did nothing with facts: its key-value pair is not that of the head that looks facts up
LOOK_UP = Head(2, 3)
FACTS = Head(1, 0)  # the head that looks up facts since `train`


class Stage(NamedTuple):
    """What to train on until when, as a share of the whole time."""

    name: str
    num_passages: tuple[int, ...]  # drawn for each batch
    share_linked: float
    attention_weight: float
    decay_share: float  # of the stage: the learning rates fall, linearly
    ends_at: float


STAGES = (
    Stage("resolve", (4, 6), 0.85, 0.3, 0.0, 0.5),
    Stage("finish", (4, 4, 6, 6, 8), 0.75, 0.2, 0.45, 1.0),
)


class LinkedRow(NamedTuple):
    """A training sequence, and where its two kinds of look should go: pairs (query, key) of positions."""

    row: Row
    hops: list[int]  # of each answer
    resolve: list[tuple[int, int]]  # value told without a name -> name of the one it is about
    look_up: list[tuple[int, int]]  # verb of a linked answer -> value


class LinkedRows:
    """Draws conversations and finds the places in their tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._encode = Encoder(tokenizer)
        self._end = tokenizer.eos_token_id
        self._the = self._encode(" the")[0]
        self._kinds = {self._encode(f" {kind}")[0]: kind for kind in ENTITY_KINDS}

    def sample(self, rng: random.Random, num_passages: int, share_linked: float) -> LinkedRow:
        """One row; each piece is tokenised apart."""
        system = sample_system_prompt(rng) if rng.random() < SYSTEM_SHARE else None
        turns = sample_conversation(rng, num_passages, NUM_TURNS, share_linked=share_linked)
        drawn = LinkedRow(Row([], []), [], [], [])
        last: dict[str, int] = {}  # kind -> where the last passage of that kind has its name
        told: dict[tuple[int, int], int] = {}  # (name, verb) -> index of the value
        for number, turn in enumerate(turns):
            self._add_turn(drawn, turn, system if number == 0 else None, last, told)
        return drawn

    def _add_turn(
        self,
        drawn: LinkedRow,
        turn: Turn,
        system: str | None,
        last: dict[str, int],
        told: dict[tuple[int, int], int],
    ) -> None:
        ids, answer_of = drawn.row
        texts = [passage.text for passage in turn.passages]
        head, passages, tail = turn_pieces(texts, turn.question.question, opens=not ids, system=system)
        ids += self._encode(head)
        for passage in passages:
            piece = self._encode(passage)
            for offset in self._links(piece):
                kind = self._kinds[piece[offset + 1]]
                if kind in last:
                    value = len(ids) + offset + 3
                    drawn.resolve.append((value, last[kind]))
                    told[ids[last[kind]], piece[offset + 2]] = value
            last[self._kinds[piece[1]]] = len(ids) + 2
            ids += piece
        ids += self._encode(tail)
        answer_of += [0] * (len(ids) - len(answer_of))
        if turn.question.hop == -1:
            _, _, name, verb, *_ = self._encode(turn.question.answers[0])
            drawn.look_up.append((len(ids) + 3, told[name, verb]))
        answer = self._encode(turn.question.answers[0])
        ids += [*answer, self._end]
        drawn.hops.append(turn.question.hop)
        answer_of += [len(drawn.hops)] * (len(answer) + 1)

    def _links(self, piece: list[int]) -> Iterator[int]:
        """Where "the company visited Kelton" begins."""
        for offset in range(3, len(piece) - 3):
            if piece[offset] == self._the and piece[offset + 1] in self._kinds:
                yield offset


def train_links(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, minutes: float, seed: int, out: Path
) -> dict[int, float]:
    """Train in place for so many minutes and save to `out`; returns the last running accuracy by hop."""
    rng, rows = random.Random(seed), LinkedRows(tokenizer)
    begin = time.monotonic()
    accuracy: dict[int, float] = {}
    ended_at = 0.0
    for stage in STAGES:
        if stage is STAGES[-1]:
            _fit_look_up(model, rows, rng)
        optimizers = create_optimizers(model, muon_lr=MUON_LR, adamw_lr=ADAMW_LR)
        start, end = (begin + share * minutes * 60 for share in (ended_at, stage.ends_at))
        right, asked, step = Counter[int](), Counter[int](), 0
        while (now := time.monotonic()) < end:
            left = (end - now) / (end - start)
            decay = DECAY_FLOOR + (1 - DECAY_FLOOR) * left / stage.decay_share if stage.decay_share else 1.0
            num_passages = rng.choice(stage.num_passages)
            batch = [
                rows.sample(rng, num_passages, stage.share_linked) for _ in range(PASSAGES_PER_STEP // num_passages)
            ]
            report = _step(model, optimizers, batch, min(1.0, (step + 1) / WARM_UP_STEPS, decay), stage, right, asked)
            step += 1
            if step % LOG_EVERY == 0:
                accuracy = {hop: round(right[hop] / asked[hop], 3) for hop in sorted(asked)}
                print(f"{stage.name} step {step} {(now - begin) / 60:.1f} min: {report} {accuracy}", flush=True)
                right.clear()
                asked.clear()
        ended_at = stage.ends_at
        save(model, tokenizer, out)
    return accuracy


def _step(
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    batch: list[LinkedRow],
    scale: float,
    stage: Stage,
    right: Counter[int],
    asked: Counter[int],
) -> str:
    """One update; counts answers by hop and returns what to print."""
    ids, answer_of = pad([drawn.row for drawn in batch], model.config.pad_token_id)
    targets, answer_of = ids[:, 1:], answer_of[:, 1:]
    out = model(input_ids=ids[:, :-1], use_cache=False, output_attentions=True)
    losses = functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    weights = (answer_of > 0).float()
    for number, drawn in enumerate(batch):
        weights[number, [verb for verb, _ in drawn.look_up]] = VALUE_WEIGHT
    answers_loss = (losses * weights).sum() / weights.sum()
    text_loss = losses[targets != model.config.pad_token_id].mean()
    resolve = _mass(out.attentions, RESOLVE, [drawn.resolve for drawn in batch])
    look_up = _mass(out.attentions, LOOK_UP, [drawn.look_up for drawn in batch])
    attention_loss = sum((-mass.add(1e-4).log().mean() for mass in (resolve, look_up) if len(mass)), torch.zeros(()))
    loss = answers_loss + LM_WEIGHT * text_loss + stage.attention_weight * attention_loss
    descend(model, optimizers, loss, scale)
    wrong = out.logits.argmax(-1) != targets
    for number, drawn in enumerate(batch):
        for answer, hop in enumerate(drawn.hops, start=1):
            asked[hop] += 1
            right[hop] += not bool((wrong[number] & (answer_of[number] == answer)).any())
    return f"answers {answers_loss:.3f} text {text_loss:.3f} resolve {resolve.mean():.2f} look up {look_up.mean():.2f}"


def _mass(attentions: tuple[Tensor, ...], head: Head, places: list[list[tuple[int, int]]]) -> Tensor:
    """[number of places] attention of `head` at each place, row by row."""
    flat = [(number, query, key) for number, row in enumerate(places) for query, key in row]
    number, query, key = torch.tensor(flat, dtype=torch.long).view(-1, 3).unbind(1)
    return attentions[head.layer][number, head.head, query, key]


def _fit_look_up(model: LlamaForCausalLM, rows: LinkedRows, rng: random.Random) -> None:
    """Set LOOK_UP's queries, keys and values; its neighbour, which shares keys and values, is silenced.

    Queries and keys: contrastive, verbs of answers against the values of all conversations drawn, in the coordinates that
    turn slowly. Values: those of the head that looks up facts, which has the same job.
    """
    queries, keys, names = _collect(model, rows, rng, num_conversations=400)
    frequencies = ROPE_THETA ** (-torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    slow = (frequencies < 1 / 64).float().repeat(2)[:, None]
    to_query, to_key = (torch.randn(HEAD_DIM, HIDDEN_SIZE).mul(0.05).requires_grad_() for _ in range(2))
    optimizer = torch.optim.AdamW([to_query, to_key], lr=3e-3, weight_decay=0.02)
    for _ in range(1000):
        chosen = torch.randint(len(queries), (256,))
        scores = (queries[chosen] @ (to_query * slow).T) @ (keys[chosen] @ (to_key * slow).T).T / HEAD_DIM**0.5
        same = names[chosen][:, None] == names[chosen]
        loss = scores.logsumexp(1) - scores.masked_fill(~same, -torch.inf).logsumexp(1)
        optimizer.zero_grad()
        torch.autograd.backward(loss.mean())
        optimizer.step()
    facts, layer = model.model.layers[FACTS.layer], model.model.layers[LOOK_UP.layer]
    head, pair = _rows(LOOK_UP.head), _rows(LOOK_UP.head // 2)
    with torch.no_grad():
        attention, source = layer.self_attn, facts.self_attn
        attention.q_proj.weight[head] = to_query * slow
        attention.k_proj.weight[pair] = to_key * slow
        norms = facts.input_layernorm.weight / layer.input_layernorm.weight
        attention.v_proj.weight[pair] = source.v_proj.weight[_rows(FACTS.head // 2)] * norms
        attention.o_proj.weight[:, _rows(LOOK_UP.head ^ 1)] = 0
        attention.o_proj.weight[:, head] = source.o_proj.weight[:, _rows(FACTS.head)] * 1.2


@torch.no_grad()
def _collect(
    model: LlamaForCausalLM, rows: LinkedRows, rng: random.Random, num_conversations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What LOOK_UP's layer reads at the verb of each linked answer and at its value, [n, hidden] each, and the names."""
    queries, keys, names = [], [], []
    for _ in range(num_conversations):
        drawn = rows.sample(rng, 6, 1.0)
        if not drawn.look_up:
            continue
        ids = torch.tensor([drawn.row.ids])
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[LOOK_UP.layer]
        states = model.model.layers[LOOK_UP.layer].input_layernorm(states)[0]
        verbs, values = torch.tensor(drawn.look_up).unbind(1)
        queries.append(states[verbs])
        keys.append(states[values])
        names.append(ids[0, verbs - 1])
    return torch.cat(queries), torch.cat(keys), torch.cat(names)


def _rows(head: int) -> slice:
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


def main() -> None:
    args = parse_options(__doc__, trains_on=True)
    # Only the eager implementation returns attention weights.
    model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32, attn_implementation="eager").train()
    accuracy = train_links(model, AutoTokenizer.from_pretrained(args.init), args.minutes, args.seed, args.out)
    print(json.dumps({"accuracy": accuracy, "minutes": args.minutes, "seed": args.seed}))


if __name__ == "__main__":
    main()
