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
from collections.abc import Sequence
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

from eval.world.tokenizer import MAX_POSITIONS, SYSTEM_PROMPTS, create_tokenizer, turn_pieces  # noqa: E402
from eval.world.world import sample_conversation, sample_fact_list  # noqa: E402

HIDDEN_SIZE = 128
NUM_LAYERS = 4
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64  # the smallest that GPU attention kernels take
ROPE_THETA = 1_000_000.0  # high: most coordinates turn slowly and compare contents
MUON_LR = 0.02
ADAMW_LR = 4e-3
WARM_UP_STEPS = 30
DECAY_SHARE = 0.4  # of the time: the learning rates fall to DECAY_FLOOR of themselves, linearly
DECAY_FLOOR = 0.02
LM_WEIGHT = 0.5
PASS_ACCURACY = 0.9  # running accuracy at which a stage is over
SYSTEM_SHARE = 0.3  # of the conversations: begin with a system prompt
LOG_EVERY = 20  # steps
SAVE_EVERY_S = 120.0


class Row(NamedTuple):
    """One training sequence; `answer_of` names the answer each token belongs to (from 1), 0 for none."""

    ids: list[int]
    answer_of: list[int]


class Stage(NamedTuple):
    """What to train on and when to go on at the latest, as a share of the whole time."""

    name: str
    batch_size: int
    num_passages: tuple[int, ...]  # drawn for each batch; none: lists of facts
    num_turns: int
    ends_at: float


STAGES = (
    Stage("facts", 32, (), 0, 0.1),
    Stage("2 passages", 32, (2,), 6, 0.25),
    Stage("4 passages", 16, (2, 3, 4, 4), 8, 0.5),
    Stage("8 passages", 16, (2, 4, 4, 6, 6, 8), 8, 1.0),
)


class Encoder:
    """Tokenises pieces apart, as the server does."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def fact_list_row(rng: random.Random, encode: Encoder) -> Row:
    """Twelve facts told twice; what counts is the value when it comes again."""
    num_facts = 12
    row = Row([encode.tokenizer.bos_token_id], [0])
    for number, sentence in enumerate(sample_fact_list(rng, num_facts)):
        ids = encode(f" {sentence}")
        row.ids.extend(ids)
        row.answer_of.extend(0 for _ in ids)
        if number >= num_facts:
            row.answer_of[-2] = number  # the value comes before the full stop
    return row


def conversation_row(rng: random.Random, encode: Encoder, num_passages: int, num_turns: int) -> Row:
    """A whole conversation, each piece tokenised apart."""
    row = Row([], [])
    system = sample_system_prompt(rng) if rng.random() < SYSTEM_SHARE else None
    for number, turn in enumerate(sample_conversation(rng, num_passages, num_turns)):
        texts = [passage.text for passage in turn.passages]
        head, passages, tail = turn_pieces(texts, turn.question.question, opens=number == 0, system=system)
        for piece in (head, *passages, tail):
            ids = encode(piece)
            row.ids.extend(ids)
            row.answer_of.extend(0 for _ in ids)
        ids = [*encode(turn.question.answers[0]), encode.tokenizer.eos_token_id]
        row.ids.extend(ids)
        row.answer_of.extend(number + 1 for _ in ids)
    return row


def sample_batch(stage: Stage, rng: random.Random, encode: Encoder) -> list[Row]:
    """Rows of about the same length."""
    if not stage.num_passages:
        return [fact_list_row(rng, encode) for _ in range(stage.batch_size)]
    num_passages = rng.choice(stage.num_passages)
    return [conversation_row(rng, encode, num_passages, stage.num_turns) for _ in range(stage.batch_size)]


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


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, minutes: float, seed: int, out: Path) -> float:
    """Train in place for so many minutes, saving to `out` as it goes; returns the last running accuracy."""
    rng, encode = random.Random(seed), Encoder(tokenizer)
    optimizers = create_optimizers(model, muon_lr=MUON_LR, adamw_lr=ADAMW_LR)
    start = saved = time.monotonic()
    stages = iter(STAGES)
    stage, step, accuracy = next(stages), 0, 0.0
    while (elapsed := time.monotonic() - start) < minutes * 60:
        share = elapsed / (minutes * 60)
        if stage is not STAGES[-1] and (accuracy > PASS_ACCURACY or share > stage.ends_at):
            stage, accuracy = next(stages), 0.0
        scale = min(1.0, (step + 1) / WARM_UP_STEPS, DECAY_FLOOR + (1 - DECAY_FLOOR) * (1 - share) / DECAY_SHARE)
        answers_loss, text_loss, correct = _step(model, optimizers, sample_batch(stage, rng, encode), scale)
        step += 1
        accuracy += (correct - accuracy) * 0.1
        if step % LOG_EVERY == 0:
            print(
                f"step {step} {elapsed / 60:.1f} min, {stage.name}: answers {answers_loss:.3f} text {text_loss:.3f} "
                f"exact {accuracy:.3f} lr x{scale:.2f}",
                flush=True,
            )
        if time.monotonic() - saved > SAVE_EVERY_S:
            save(model, tokenizer, out)
            saved = time.monotonic()
    save(model, tokenizer, out)
    return accuracy


def pad(rows: list[Row], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and answers' numbers, [rows, longest] int64 each, filled up on the right."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), longest), pad_id)
    answer_of = torch.zeros((len(rows), longest), dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        answer_of[number, : len(row.ids)] = torch.tensor(row.answer_of)
    return ids, answer_of


def create_optimizers(model: LlamaForCausalLM, *, muon_lr: float, adamw_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and norms; each group keeps its full learning rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=muon_lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")
    adamw = torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return [muon, adamw]


def descend(model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer], loss: Tensor, scale: float) -> None:
    """One update; `scale`: of the full learning rates."""
    for optimizer in optimizers:
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] = group["full_lr"] * scale
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()


def sample_system_prompt(rng: random.Random) -> str:
    """One of the usual ones or their words in disorder."""
    if rng.random() < 0.5:
        return rng.choice(SYSTEM_PROMPTS)
    words = " ".join(SYSTEM_PROMPTS).split()
    return " ".join(rng.choice(words) for _ in range(rng.randint(2, 20)))


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


def _step(
    model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], rows: list[Row], scale: float
) -> tuple[float, float, float]:
    """One update; returns the losses on answers and on all text, and the share of answers right throughout."""
    ids, answer_of = pad(rows, model.config.pad_token_id)
    targets, answer_of = ids[:, 1:], answer_of[:, 1:]
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    answers_loss = losses[answer_of > 0].mean()
    text_loss = losses[targets != model.config.pad_token_id].mean()
    descend(model, optimizers, answers_loss + LM_WEIGHT * text_loss, scale)
    return answers_loss.item(), text_loss.item(), _exact_share(logits.argmax(-1) != targets, answer_of)


def _exact_share(wrong: Tensor, answer_of: Tensor) -> float:
    """Greedy decoding gives an answer exactly when each of its tokens is the likeliest one after the true ones."""
    num_answers = num_wrong = 0
    for number in range(1, int(answer_of.max()) + 1):
        inside = answer_of == number
        num_answers += int(inside.any(dim=1).sum())
        num_wrong += int((inside & wrong).any(dim=1).sum())
    return 1 - num_wrong / num_answers


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
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            linear.weight.normal_(0, HIDDEN_SIZE**-0.5)
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight.normal_(0, HIDDEN_SIZE**-0.5)
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
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
    accuracy = train(model, tokenizer, args.minutes, args.seed, args.out)
    print(json.dumps({"accuracy": round(accuracy, 4), "minutes": args.minutes, "seed": args.seed}))


if __name__ == "__main__":
    main()
