"""Train the bundled model on conversations about worlds it has never seen, and write it where it is loaded from.

    python -m eval.world.train --minutes 40 --threads 1 --out sglang_chunkcache/bundled_model

Three things make so small a model bind a name with its value within minutes on one core: Muon for the matrices, the
initial weights of two layers (see `_initialise`), and a warm-up on lists of facts told twice. The loss is that of the
answers plus half a language-model loss over everything. Facts are drawn anew for every row, so nothing but the passages
can tell an answer. Same seed, same data in the same order; how many steps fit into the minutes decides the rest.
"""

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()  # must run before transformers is imported

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

from eval.world.rows import Place, Row, Rows, pad  # noqa: E402
from eval.world.tokenizer import MAX_POSITIONS, create_tokenizer  # noqa: E402

HIDDEN_SIZE = 128
NUM_LAYERS = 4
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64  # the smallest that GPU attention kernels take
ROPE_THETA = 1_000_000.0  # high: most coordinates turn slowly and compare contents
DECAY_FLOOR = 0.02
LM_WEIGHT = 0.5
VALUE_WEIGHT = 3.0  # of a linked answer's value among the answers' tokens: it is one of six and the only hard one
PASSAGES_PER_STEP = 64
PASS_ACCURACY = 0.9  # running accuracy at which a stage is over
LOG_EVERY = 20  # steps
SAVE_EVERY_S = 120.0


class Head(NamedTuple):
    """Counted from 0."""

    layer: int
    head: int


RESOLVE = Head(1, 2)  # did nothing with facts: its key-value pair is not that of the head that looks facts up
LOOK_UP = Head(2, 3)


class Stage(NamedTuple):
    """What to train on and when to go on at the latest, as a share of the phase."""

    name: str
    batch_size: int | None  # None: as many conversations as have PASSAGES_PER_STEP
    num_passages: tuple[int, ...]  # drawn for each batch; none: lists of facts
    num_turns: int
    ends_at: float = 1.0
    share_linked: float = 0.0
    attention_weight: float = 0.0  # of the loss of heads that are told where to attend


class Phase(NamedTuple):
    """Stages with the same optimizers; learning rates rise at its begin and fall at its end."""

    stages: Sequence[Stage]
    ends_at: float  # share of the whole time
    muon_lr: float
    adamw_lr: float
    warm_up: int  # steps
    decay_share: float  # of the phase: the learning rates fall to DECAY_FLOOR of themselves, linearly
    prepare: Callable[[LlamaForCausalLM, Rows, random.Random], None] | None = None


STAGES = (
    Stage("facts", 32, (), 0, 0.1),
    Stage("2 passages", 32, (2,), 6, 0.25),
    Stage("4 passages", 16, (2, 3, 4, 4), 8, 0.5),
    Stage("8 passages", 16, (2, 4, 4, 6, 6, 8), 8),
)
Keep = Callable[[], None]
"""Saves the model."""
PHASES = (Phase(STAGES, 1.0, muon_lr=0.02, adamw_lr=4e-3, warm_up=30, decay_share=0.4),)


def sample_batch(stage: Stage, rng: random.Random, rows: Rows) -> list[Row]:
    """Rows of about the same length."""
    if not stage.num_passages:
        return [rows.fact_list(rng) for _ in range(stage.batch_size or 0)]
    num_passages = rng.choice(stage.num_passages)
    return [
        rows.conversation(rng, num_passages, stage.num_turns, share_linked=stage.share_linked)
        for _ in range(stage.batch_size or PASSAGES_PER_STEP // num_passages)
    ]


def create_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model, float32, whose first-layer heads look 1, 2, 3 and 4 tokens back."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        _initialise(model)
    return model


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    phases: Sequence[Phase] = PHASES,
    *,
    minutes: float,
    seed: int,
) -> dict[int, float]:
    """Train in place for so many minutes, saving to `out` as it goes; returns the last accuracy by hop."""
    rng, rows = random.Random(seed), Rows(tokenizer)
    start = begin = time.monotonic()
    by_hop: dict[int, float] = {}
    for phase in phases:
        if phase.prepare:
            phase.prepare(model, rows, rng)
        end = begin + phase.ends_at * minutes * 60
        by_hop = _train_phase(model, phase, rows, rng, start, end, lambda: save(model, tokenizer, out)) or by_hop
        start = end
    return by_hop


def _train_phase(
    model: LlamaForCausalLM, phase: Phase, rows: Rows, rng: random.Random, start: float, end: float, keep: Keep
) -> dict[int, float]:
    """From `start` to `end`, by the monotonic clock in seconds."""
    optimizers = _create_optimizers(model, phase)
    stages = iter(phase.stages)
    stage, step, accuracy, saved = next(stages), 0, 0.0, start
    right, asked = Counter[int](), Counter[int]()
    by_hop: dict[int, float] = {}
    while (now := time.monotonic()) < end:
        share = (now - start) / (end - start)
        if stage is not phase.stages[-1] and (accuracy > PASS_ACCURACY or share > stage.ends_at):
            stage, accuracy = next(stages), 0.0
        decay = DECAY_FLOOR + (1 - DECAY_FLOOR) * (1 - share) / phase.decay_share if phase.decay_share else 1.0
        scale = min(1.0, (step + 1) / phase.warm_up, decay)
        report, hops, correct = _step(model, optimizers, sample_batch(stage, rng, rows), stage, scale)
        step += 1
        asked.update(hops)
        right.update(correct)
        accuracy += (len(correct) / len(hops) - accuracy) * 0.1
        if step % LOG_EVERY == 0:
            by_hop = {hop: round(right[hop] / asked[hop], 3) for hop in sorted(asked)}
            print(f"{stage.name} step {step} {share:.0%}: {report} lr x{scale:.2f} exact {by_hop}", flush=True)
            right.clear()
            asked.clear()
        if time.monotonic() - saved > SAVE_EVERY_S:
            keep()
            saved = time.monotonic()
    keep()
    return by_hop


def _create_optimizers(model: LlamaForCausalLM, phase: Phase) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and norms; each group keeps its full learning rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=phase.muon_lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")
    adamw = torch.optim.AdamW(others, lr=phase.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return [muon, adamw]


def _step(
    model: LlamaForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Sequence[Row],
    stage: Stage,
    scale: float,
) -> tuple[str, list[int], list[int]]:
    """One update; returns what to print, the hops of the answers, and the hops of those that greedy decoding gives."""
    ids, answer_of = pad(batch, model.config.pad_token_id)
    targets, answer_of = ids[:, 1:], answer_of[:, 1:]
    out = model(input_ids=ids[:, :-1], use_cache=False, output_attentions=bool(stage.attention_weight))
    losses = functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    weights = (answer_of > 0).float()
    for number, row in enumerate(batch):
        weights[number, [verb for verb, _ in row.look_up]] = VALUE_WEIGHT
    answers_loss = (losses * weights).sum() / weights.sum()
    text_loss = losses[targets != model.config.pad_token_id].mean()
    loss, report = answers_loss + LM_WEIGHT * text_loss, f"answers {answers_loss:.3f} text {text_loss:.3f}"
    for head, looks in ((RESOLVE, "resolve"), (LOOK_UP, "look_up")) if stage.attention_weight else ():
        mass = _mass(out.attentions, head, [getattr(row, looks) for row in batch])
        if len(mass):
            loss = loss - stage.attention_weight * mass.add(1e-4).log().mean()
            report += f" {looks} {mass.mean():.2f}"
    for optimizer in optimizers:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = group["full_lr"] * scale
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    wrong = out.logits.argmax(-1) != targets
    correct = [
        hop
        for number, row in enumerate(batch)
        for answer, hop in enumerate(row.hops, start=1)
        if not bool((wrong[number] & (answer_of[number] == answer)).any())
    ]
    return report, [hop for row in batch for hop in row.hops], correct


def _mass(attentions: tuple[Tensor, ...], head: Head, places: Sequence[Sequence[Place]]) -> Tensor:
    """[number of places] attention of `head` at each place, row by row."""
    flat = [(number, query, key) for number, row in enumerate(places) for query, key in row]
    number, query, key = torch.tensor(flat, dtype=torch.long).view(-1, 3).unbind(1)
    return attentions[head.layer][number, head.head, query, key]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights as bfloat16, configuration, generation settings and tokenizer; the model itself stays as it is."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 5 writes what older versions do not know, or would silently replace by a default.
    for name, old_style in (
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("config.json", {"rope_theta": ROPE_THETA}),
    ):
        path = out / name
        path.write_text(json.dumps(json.loads(path.read_text()) | old_style, indent=2) + "\n")


def _initialise(model: LlamaForCausalLM) -> None:
    """Random weights, except for the two mechanisms that training alone takes far too long to find.

    Layer 0, looking back: its heads attend 1, 2, 3 and 4 tokens back, and the first two write what they find into
    separate halves of the hidden space. Layer 1, looking up: its first head compares the one half of a query (the
    token one back) with the other half of a key (the token two back) and copies the key's token. In `{name}
    {verb} {value}` the verb thereby finds the value that followed the same name before. Questions, choosing among an
    entity's facts and chaining two of them are left to training, and these weights are trained like all others.
    """
    spread, constant = 0.05, 0.25  # of the embeddings: random part, and the one coordinate all tokens share
    embedding = model.model.embed_tokens.weight.normal_(0, spread)
    embedding[:, 0] = constant
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight.normal_(0, HIDDEN_SIZE**-0.5)
        for linear in (attention.o_proj, mlp.down_proj):
            linear.weight.normal_(0, 0.5 * linear.in_features**-0.5)
    embedding_norm = math.sqrt(spread**2 * (HIDDEN_SIZE - 1) + constant**2)
    frequencies = ROPE_THETA ** (-torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    look_back, look_up = model.model.layers[0], model.model.layers[1]
    look_back.mlp.down_proj.weight.mul_(0.2)
    _attend_to_distances(look_back.self_attn, frequencies, constant * math.sqrt(HIDDEN_SIZE) / embedding_norm)
    halves = _write_halves(look_back.self_attn, embedding_norm)
    _match_halves(look_up.self_attn, frequencies, halves)


def _attend_to_distances(attention: LlamaAttention, frequencies: Tensor, constant: float) -> None:
    """Head h attends h + 1 tokens back.

    Queries and keys read the shared coordinate, `constant` after the norm, so their product is a function of distance
    alone: a sum of cosines, one per rotary frequency, highest where the query's turn and the distance cancel out.
    """
    peak = 20.0  # the score at the favoured distance
    lengths = (frequencies / frequencies.sum()).sqrt() * math.sqrt(peak * math.sqrt(HEAD_DIM)) / constant
    attention.q_proj.weight.normal_(0, 0.02)
    attention.k_proj.weight.normal_(0, 0.02)
    keys = attention.k_proj.weight.view(NUM_KV_HEADS, 2, HEAD_DIM // 2, HIDDEN_SIZE)
    queries = attention.q_proj.weight.view(NUM_HEADS, 2, HEAD_DIM // 2, HIDDEN_SIZE)
    keys[:, 0, :, 0] = lengths
    keys[:, 1, :, 0] = 0
    for head in range(NUM_HEADS):
        distance = head + 1
        queries[head, 0, :, 0] = lengths * torch.cos(distance * frequencies)
        queries[head, 1, :, 0] = -lengths * torch.sin(distance * frequencies)


def _write_halves(attention: LlamaAttention, embedding_norm: float) -> tuple[Tensor, Tensor]:
    """Heads 0 and 1, which share their values, write into two halves of the hidden space; returns the bases."""
    strength = 2.0  # norm of what a head writes, in norms of an embedding
    found = math.sqrt(HIDDEN_SIZE) * math.sqrt(HEAD_DIM / HIDDEN_SIZE)  # norm of a value vector
    both = _orthonormal(HIDDEN_SIZE, 2 * HEAD_DIM)
    attention.v_proj.weight[:HEAD_DIM] = _orthonormal(HIDDEN_SIZE, HEAD_DIM).T
    attention.o_proj.weight.mul_(0.2)
    attention.o_proj.weight[:, : 2 * HEAD_DIM] = both * strength * embedding_norm / found
    return both[:, :HEAD_DIM], both[:, HEAD_DIM:]


def _match_halves(attention: LlamaAttention, frequencies: Tensor, halves: tuple[Tensor, Tensor]) -> None:
    """Head 0 compares a query's first half with a key's second one and copies the token found."""
    sharpness, copied = 1.3, 0.2
    # Only coordinates that turn by less than 1/64 a token compare contents rather than distances.
    slow = (frequencies < 1 / 64).float().repeat(2)
    mixed = _orthonormal(HEAD_DIM, HEAD_DIM) * slow[:, None] * sharpness
    attention.q_proj.weight[:HEAD_DIM] = mixed @ halves[0].T
    attention.k_proj.weight[:HEAD_DIM] = mixed @ halves[1].T
    read = _orthonormal(HIDDEN_SIZE, HEAD_DIM)
    attention.v_proj.weight[:HEAD_DIM] = read.T
    attention.o_proj.weight[:, :HEAD_DIM] = read * copied


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Random orthonormal columns."""
    basis: Tensor = torch.linalg.qr(torch.randn(rows, columns)).Q
    return basis


def parse_options(description: str | None, *, trains_on: bool = False) -> argparse.Namespace:
    """Minutes, threads, seed, `out`, and with `trains_on` also `init`; sets torch's threads and seed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=model_dir())
    parser.add_argument("--seed", type=int, default=0)
    if trains_on:
        parser.add_argument("--init", type=Path, default=model_dir(), help="what `train` wrote")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    return args


def main() -> None:
    args = parse_options(__doc__)
    tokenizer = create_tokenizer()
    model = create_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    accuracy = train(model, tokenizer, args.out, minutes=args.minutes, seed=args.seed)
    print(json.dumps({"accuracy": accuracy, "minutes": args.minutes, "seed": args.seed}))


if __name__ == "__main__":
    main()
