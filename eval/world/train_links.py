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

import torch
from torch import Tensor

from eval.world.rows import Rows
from eval.world.train import HEAD_DIM, HIDDEN_SIZE, LOOK_UP, ROPE_THETA, Head, Phase, Stage, parse_options, train
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops

define_torchvision_ops()  # must run before transformers is imported

from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402

FACTS = Head(1, 0)  # the head that looks up facts since `train`
RESOLVING = Stage("resolve", None, (4, 6), 8, share_linked=0.85, attention_weight=0.3)
FINISHING = Stage("finish", None, (4, 4, 6, 6, 8), 8, share_linked=0.75, attention_weight=0.2)


def _fit_look_up(model: LlamaForCausalLM, rows: Rows, rng: random.Random) -> None:
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
    model: LlamaForCausalLM, rows: Rows, rng: random.Random, num_conversations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What LOOK_UP's layer reads at the verb of each linked answer and at its value, [n, hidden] each, and the names."""
    queries, keys, names = [], [], []
    for _ in range(num_conversations):
        drawn = rows.conversation(rng, 6, 8, share_linked=1.0)
        if not drawn.look_up:
            continue
        ids = torch.tensor([drawn.ids])
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[LOOK_UP.layer]
        states = model.model.layers[LOOK_UP.layer].input_layernorm(states)[0]
        verbs, values = torch.tensor(drawn.look_up).unbind(1)
        queries.append(states[verbs])
        keys.append(states[values])
        names.append(ids[0, verbs - 1])
    return torch.cat(queries), torch.cat(keys), torch.cat(names)


def _rows(head: int) -> slice:
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


PHASES = (
    Phase((RESOLVING,), 0.5, muon_lr=0.01, adamw_lr=1e-3, warm_up=20, decay_share=0.0),
    Phase((FINISHING,), 1.0, muon_lr=0.01, adamw_lr=1e-3, warm_up=20, decay_share=0.45, prepare=_fit_look_up),
)


def main() -> None:
    args = parse_options(__doc__, trains_on=True)
    # Only the eager implementation returns attention weights.
    model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32, attn_implementation="eager").train()
    tokenizer = AutoTokenizer.from_pretrained(args.init)
    accuracy = train(model, tokenizer, args.out, PHASES, minutes=args.minutes, seed=args.seed)
    print(json.dumps({"accuracy": accuracy, "minutes": args.minutes, "seed": args.seed}))


if __name__ == "__main__":
    main()
