"""Train the bundled model on conversations about worlds it has never seen, then on worlds with
links.

    python -m eval.world.train --minutes 40 --out DIR              facts, from nothing
    python -m eval.world.train --minutes 40 --init DIR --out DIR   facts told without a name
                                                                   (`links`), from the former

Three things make so small a model bind a name with its value within minutes on one core: Muon for
the matrices, the initial weights of two layers (see `_initialise`), and a warm-up on lists of facts
told twice. The loss is that of the answers plus half a language-model loss over everything. Facts
are drawn anew for every row, so nothing but the passages can tell an answer. Same seed, same data
in the same order; how many steps fit into the minutes decides the rest.

"Later the company visited Kelton" is learned in two moves, and neither was found by the loss on
answers alone: the value's token looks for the last passage about a company (`RESOLVE`) and, once
the verb of an answer is written, looks for the value whose company is the one asked about
(`LOOK_UP`). Each gets a head of its own that is told where to attend for as long as training lasts.
Between the two stages `_fit_look_up` sets the second head's weights by themselves: it gains nothing
from training until names match, and names match little until it gains.
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
from torch.nn.utils.rnn import pad_sequence

from retrieval.command_line import Parser
from sglang_chunkcache.bundled_model import model_dir
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()  # must run before transformers is imported

from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers import PreTrainedTokenizerFast as Tokenizer  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

from eval.world.rows import Row, Rows  # noqa: E402
from eval.world.tokenizer import MAX_POSITIONS, create_tokenizer  # noqa: E402

HIDDEN_SIZE = 128
NUM_LAYERS = 4  # of the bundled model
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64  # the smallest that GPU attention kernels take
ROPE_THETA = 1_000_000.0  # high: most coordinates turn slowly and compare contents
FREQUENCIES = ROPE_THETA ** (-torch.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
# coordinates that compare contents rather than distances
SLOW = (FREQUENCIES < 1 / 64).float().repeat(2)[:, None]
WARM_UP = 30  # steps in which the learning rates rise
DECAY_FLOOR = 0.02
LM_WEIGHT = 0.5
# of a linked answer's value among the answers' tokens: it is one of six and the only hard one
VALUE_WEIGHT = 3.0
PASS_ACCURACY = 0.9  # running accuracy at which a stage is over
LOG_EVERY = 20  # steps


class Head(NamedTuple):
    """Counted from 0."""

    layer: int
    head: int


FACTS = Head(1, 0)  # looks up facts
RESOLVE = Head(1, 2)  # did nothing with facts: its key-value pair is not that of FACTS
LOOK_UP = Head(2, 3)


class Stage(NamedTuple):
    """What to train on and when to go on at the latest, as a share of the minutes."""

    name: str
    ends_at: float
    batch_size: int
    num_passages: tuple[int, ...] = ()  # drawn for each batch; none: lists of facts
    num_turns: int = 8
    share_linked: float = 0.0
    attention_weight: float = 0.0  # of the loss of heads that are told where to attend
    fits_look_up: bool = False  # before it


class Curriculum(NamedTuple):
    """Stages and learning rates, which fall linearly to DECAY_FLOOR of themselves in the last
    `decay_share`."""

    stages: Sequence[Stage]
    muon_lr: float
    adamw_lr: float
    decay_share: float


ON_FACTS = Curriculum(
    (
        Stage("facts", 0.1, 32),
        Stage("2 passages", 0.25, 32, (2,), 6),
        Stage("4 passages", 0.5, 16, (2, 3, 4, 4)),
        Stage("8 passages", 1.0, 16, (2, 4, 4, 6, 6, 8)),
    ),
    muon_lr=0.02,
    adamw_lr=4e-3,
    decay_share=0.4,
)
ON_LINKS = Curriculum(
    (
        Stage("resolve", 0.5, 12, (4, 6), share_linked=0.85, attention_weight=0.3),
        Stage(
            "finish",
            1.0,
            12,
            (4, 4, 6, 6, 8),
            share_linked=0.75,
            attention_weight=0.2,
            fits_look_up=True,
        ),
    ),
    muon_lr=0.01,
    adamw_lr=1e-3,
    decay_share=0.225,
)


def create_model(tokenizer: Tokenizer, num_layers: int) -> LlamaForCausalLM:
    """An untrained model, float32, whose first-layer heads look 1, 2, 3 and 4 tokens back."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        **_special_ids(tokenizer),
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        _initialise(model)
    return model


def train(
    model: LlamaForCausalLM,
    rows: Rows,
    curriculum: Curriculum,
    *,
    minutes: float,
    rng: random.Random,
) -> float:
    """Train in place for so many minutes; returns the running share of answers that greedy decoding
    gives."""
    begin, step, accuracy = time.monotonic(), 0, 0.0
    optimizers = _create_optimizers(model, curriculum)
    for stage in curriculum.stages:
        if stage.fits_look_up:
            _fit_look_up(model, rows, rng)
            optimizers, step = _create_optimizers(model, curriculum), 0
        accuracy = 0.0
        while (share := (time.monotonic() - begin) / (60 * minutes)) < stage.ends_at:
            if accuracy > PASS_ACCURACY and stage.ends_at < 1:
                break
            decay = DECAY_FLOOR + (1 - DECAY_FLOOR) * (1 - share) / curriculum.decay_share
            scale, step = min(1.0, (step + 1) / WARM_UP, decay), step + 1
            report, right = _step(
                model, optimizers, _sample_batch(stage, rng, rows), stage.attention_weight, scale
            )
            accuracy += (right - accuracy) * 0.1
            if step % LOG_EVERY == 0:
                print(
                    f"{stage.name} step {step} {share:.0%}: {report} exact {accuracy:.3f}",
                    flush=True,
                )
    return accuracy


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights as bfloat16, configuration, generation settings and tokenizer."""
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    GenerationConfig(do_sample=False, **_special_ids(tokenizer)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 5 writes what older versions do not know, or would silently replace by a default.
    for name, old_style in (
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("config.json", {"rope_theta": ROPE_THETA}),
    ):
        path = out / name
        path.write_text(json.dumps(json.loads(path.read_text()) | old_style, indent=2) + "\n")


def main() -> None:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="without --init; at least 3")
    parser.add_argument("--init", type=Path, help="a model that knows facts, to be taught links")
    parser.add_argument("--out", type=Path, default=model_dir())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.init) if args.init else create_tokenizer()
    if args.init:  # Only the eager implementation returns attention weights.
        model = LlamaForCausalLM.from_pretrained(
            args.init, dtype=torch.float32, attn_implementation="eager"
        ).train()
    else:
        model = create_model(tokenizer, args.layers)
    curriculum = ON_LINKS if args.init else ON_FACTS
    accuracy = train(
        model, Rows(tokenizer), curriculum, minutes=args.minutes, rng=random.Random(args.seed)
    )
    save(model, tokenizer, args.out)
    print(json.dumps({"accuracy": round(accuracy, 3), "minutes": args.minutes, "seed": args.seed}))


# Private, in order of use


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    return {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }


def _create_optimizers(
    model: LlamaForCausalLM, curriculum: Curriculum
) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and norms;
    each group keeps its full learning rate."""
    is_matrix = {p: p.ndim == 2 and "embed" not in name for name, p in model.named_parameters()}
    matrices, others = (
        [p for p, its in is_matrix.items() if its == wanted] for wanted in (True, False)
    )
    muon = torch.optim.Muon(
        matrices, lr=curriculum.muon_lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
    )
    adamw = torch.optim.AdamW(others, lr=curriculum.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (muon, adamw):
        optimizer.param_groups[0]["full_lr"] = optimizer.param_groups[0]["lr"]
    return [muon, adamw]


def _sample_batch(stage: Stage, rng: random.Random, rows: Rows) -> list[Row]:
    """Rows of about the same length."""
    if not stage.num_passages:
        return [rows.fact_list(rng) for _ in range(stage.batch_size)]
    num_passages, share = rng.choice(stage.num_passages), stage.share_linked
    return [
        rows.conversation(rng, num_passages, stage.num_turns, share_linked=share)
        for _ in range(stage.batch_size)
    ]


def _step(
    model: LlamaForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    batch: Sequence[Row],
    attention_weight: float,
    scale: float,
) -> tuple[str, float]:
    """One update; returns what to print, and the share of the answers that greedy decoding
    gives."""
    pad_id = model.config.pad_token_id
    ids = pad_sequence(
        [torch.tensor(row.ids) for row in batch], batch_first=True, padding_value=pad_id
    )
    targets = ids[:, 1:]
    out = model(input_ids=ids[:, :-1], use_cache=False, output_attentions=bool(attention_weight))
    losses = functional.cross_entropy(
        out.logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view_as(targets)
    weights = torch.zeros_like(losses)
    answers = [
        (number, slice(a.start - 1, a.stop - 1))
        for number, row in enumerate(batch)
        for a in row.answers
    ]
    for place in answers:
        weights[place] = 1
    for number, row in enumerate(batch):
        weights[number, [verb for verb, _ in row.look_up]] = VALUE_WEIGHT
    answers_loss = (losses * weights).sum() / weights.sum()
    text_loss = losses[targets != pad_id].mean()
    loss, report = (
        answers_loss + LM_WEIGHT * text_loss,
        f"answers {answers_loss:.3f} text {text_loss:.3f}",
    )
    for head, looks in ((RESOLVE, "resolve"), (LOOK_UP, "look_up")) if attention_weight else ():
        places = [
            (number, *place) for number, row in enumerate(batch) for place in getattr(row, looks)
        ]
        if places:
            rows, queries, keys = torch.tensor(places).unbind(1)
            mass = out.attentions[head.layer][rows, head.head, queries, keys]
            loss = loss - attention_weight * mass.add(1e-4).log().mean()
            report += f" {looks} {mass.mean():.2f}"
    for optimizer in optimizers:
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["full_lr"] * scale
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    is_right = out.logits.argmax(-1) == targets
    return report, sum(bool(is_right[place].all()) for place in answers) / len(answers)


def _fit_look_up(model: LlamaForCausalLM, rows: Rows, rng: random.Random) -> None:
    """Set LOOK_UP's queries, keys and values; its neighbour, which shares keys and values, is
    silenced.

    Queries and keys: contrastive, verbs of answers against the values of all conversations drawn,
    in the coordinates that turn slowly. Values: those of the head that looks up facts, which has
    the same job.
    """
    queries, keys, names = _collect(model, rows, rng, num_conversations=400)
    to_query, to_key = (
        torch.randn(HEAD_DIM, HIDDEN_SIZE).mul(0.05).requires_grad_() for _ in range(2)
    )
    optimizer = torch.optim.AdamW([to_query, to_key], lr=3e-3, weight_decay=0.02)
    for _ in range(1000):
        chosen = torch.randint(len(queries), (256,))
        scores = (
            (queries[chosen] @ (to_query * SLOW).T)
            @ (keys[chosen] @ (to_key * SLOW).T).T
            / HEAD_DIM**0.5
        )
        same = names[chosen][:, None] == names[chosen]
        loss = scores.logsumexp(1) - scores.masked_fill(~same, -torch.inf).logsumexp(1)
        optimizer.zero_grad()
        torch.autograd.backward(loss.mean())
        optimizer.step()
    facts, layer = model.model.layers[FACTS.layer], model.model.layers[LOOK_UP.layer]
    head, pair = _dims(LOOK_UP.head), _dims(LOOK_UP.head // 2)
    with torch.no_grad():
        attention, source = layer.self_attn, facts.self_attn
        attention.q_proj.weight[head] = to_query * SLOW
        attention.k_proj.weight[pair] = to_key * SLOW
        norms = facts.input_layernorm.weight / layer.input_layernorm.weight
        attention.v_proj.weight[pair] = source.v_proj.weight[_dims(FACTS.head // 2)] * norms
        attention.o_proj.weight[:, _dims(LOOK_UP.head ^ 1)] = 0
        attention.o_proj.weight[:, head] = source.o_proj.weight[:, _dims(FACTS.head)] * 1.2


@torch.no_grad()
def _collect(
    model: LlamaForCausalLM, rows: Rows, rng: random.Random, num_conversations: int
) -> tuple[Tensor, ...]:
    """What LOOK_UP's layer reads at the verb of each linked answer and at its value, [n,
    hidden] each, and the names."""
    found = []
    for _ in range(num_conversations):
        drawn = rows.conversation(rng, 6, 8, share_linked=1.0)
        if drawn.look_up:
            ids, (verbs, values) = torch.tensor([drawn.ids]), torch.tensor(drawn.look_up).unbind(1)
            states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[
                LOOK_UP.layer
            ]
            states = model.model.layers[LOOK_UP.layer].input_layernorm(states)[0]
            found.append((states[verbs], states[values], ids[0, verbs - 1]))
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _dims(head: int) -> slice:
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


def _initialise(model: LlamaForCausalLM) -> None:
    """Random weights, except for the two mechanisms that training alone takes far too long to find.

    Layer 0, looking back: its heads attend 1, 2, 3 and 4 tokens back, and the first two write what
    they find into separate halves of the hidden space. Layer 1, looking up: its first head compares
    the one half of a query (the token one back) with the other half of a key (the token two back)
    and copies the key's token. In `{name} {verb} {value}` the verb thereby finds the value that
    followed the same name before. Questions, choosing among an entity's facts and chaining two of
    them are left to training, and these weights are trained like all others.
    """
    # of the embeddings: random part, and the one coordinate all tokens share
    spread, constant = 0.05, 0.25
    embedding = model.model.embed_tokens.weight.normal_(0, spread)
    embedding[:, 0] = constant
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            mlp.gate_proj,
            mlp.up_proj,
        ):
            linear.weight.normal_(0, HIDDEN_SIZE**-0.5)
        for linear in (attention.o_proj, mlp.down_proj):
            linear.weight.normal_(0, 0.5 * linear.in_features**-0.5)
    embedding_norm = math.sqrt(spread**2 * (HIDDEN_SIZE - 1) + constant**2)
    look_back, look_up = model.model.layers[0], model.model.layers[1]
    look_back.mlp.down_proj.weight.mul_(0.2)
    _attend_to_distances(look_back.self_attn, constant * math.sqrt(HIDDEN_SIZE) / embedding_norm)
    halves = _write_halves(look_back.self_attn, embedding_norm)
    _match_halves(look_up.self_attn, halves)


def _attend_to_distances(attention: LlamaAttention, constant: float) -> None:
    """Head h attends h + 1 tokens back.

    Queries and keys read the shared coordinate, `constant` after the norm, so their product is a
    function of distance alone: a sum of cosines, one per rotary frequency, highest where the
    query's turn and the distance cancel out.
    """
    peak = 20.0  # the score at the favoured distance
    lengths = (
        (FREQUENCIES / FREQUENCIES.sum()).sqrt() * math.sqrt(peak * math.sqrt(HEAD_DIM)) / constant
    )
    attention.q_proj.weight.normal_(0, 0.02)
    attention.k_proj.weight.normal_(0, 0.02)
    keys = attention.k_proj.weight.view(NUM_KV_HEADS, 2, HEAD_DIM // 2, HIDDEN_SIZE)
    queries = attention.q_proj.weight.view(NUM_HEADS, 2, HEAD_DIM // 2, HIDDEN_SIZE)
    keys[:, 0, :, 0] = lengths
    keys[:, 1, :, 0] = 0
    for head in range(NUM_HEADS):
        distance = head + 1
        queries[head, 0, :, 0] = lengths * torch.cos(distance * FREQUENCIES)
        queries[head, 1, :, 0] = -lengths * torch.sin(distance * FREQUENCIES)


def _write_halves(attention: LlamaAttention, embedding_norm: float) -> tuple[Tensor, Tensor]:
    """Heads 0 and 1, which share their values, write into two halves of the hidden space;
    returns the bases."""
    strength = 2.0  # norm of what a head writes, in norms of an embedding
    found = math.sqrt(HIDDEN_SIZE) * math.sqrt(HEAD_DIM / HIDDEN_SIZE)  # norm of a value vector
    both = _orthonormal(HIDDEN_SIZE, 2 * HEAD_DIM)
    attention.v_proj.weight[:HEAD_DIM] = _orthonormal(HIDDEN_SIZE, HEAD_DIM).T
    attention.o_proj.weight.mul_(0.2)
    attention.o_proj.weight[:, : 2 * HEAD_DIM] = both * strength * embedding_norm / found
    return both[:, :HEAD_DIM], both[:, HEAD_DIM:]


def _match_halves(attention: LlamaAttention, halves: tuple[Tensor, Tensor]) -> None:
    """Head 0 compares a query's first half with a key's second one and copies the token found."""
    sharpness, copied = 1.3, 0.2
    mixed = _orthonormal(HEAD_DIM, HEAD_DIM) * SLOW * sharpness
    attention.q_proj.weight[:HEAD_DIM] = mixed @ halves[0].T
    attention.k_proj.weight[:HEAD_DIM] = mixed @ halves[1].T
    read = _orthonormal(HIDDEN_SIZE, HEAD_DIM)
    attention.v_proj.weight[:HEAD_DIM] = read.T
    attention.o_proj.weight[:, :HEAD_DIM] = read * copied


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Random orthonormal columns."""
    basis: Tensor = torch.linalg.qr(torch.randn(rows, columns)).Q
    return basis


if __name__ == "__main__":
    main()
