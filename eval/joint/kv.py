"""KV of prompts as the server caches it, and of their chunks as the store keeps it,
from stock transformers. No server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.bench.relocate import Pool
from sglang_chunkcache.cpu.torchvision_shim import define_torchvision_ops
from sglang_chunkcache.fusion.relocate import KeyTurn, RotaryTable

define_torchvision_ops()  # must run before transformers is imported

from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM  # noqa: E402


# Comparing tensors gives tensors, so a generated `__eq__` would raise.
@dataclass(frozen=True, eq=False)
class Cached:
    """A prompt's KV in the KV pool, with the queries that read it."""

    pool: Pool
    """Slot i is position i; [num_tokens, num_kv_heads, head_dim] per layer, keys rotated."""
    queries: list[Tensor]
    """[num_tokens, num_heads, head_dim] per layer, rotated."""
    spans: list[tuple[int, int]]
    """Of the prompt's pieces, in order."""
    log_probs: Tensor
    """[vocab_size] float32: of the token after the prompt."""
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.queries[0])


class ModelKv:
    """A Llama and its tokenizer, in the weights' own bfloat16, as the server runs it."""

    def __init__(self, path: Path) -> None:
        self._model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        angles = (
            torch.arange(self._model.config.max_position_embeddings)[:, None]
            * self._model.model.rotary_emb.inv_freq.float()
        )
        self._table = RotaryTable(angles.cos(), angles.sin(), is_neox=True)
        self._queries: list[Tensor] = []
        for layer in self._model.model.layers:
            # transformers returns keys and values, but no queries; here they are not rotated yet.
            layer.self_attn.q_proj.register_forward_hook(self._keep)

    @torch.inference_mode()
    def cached(self, pieces: Sequence[str]) -> Cached:
        """Compute a prompt of these pieces, each tokenised apart."""
        encoded = [self._tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        ends, token_ids = list(accumulate(map(len, encoded))), [*chain.from_iterable(encoded)]
        self._queries = []
        found = self._model(torch.tensor([token_ids]), use_cache=True)
        layers = found.past_key_values.layers
        keys, values = (
            [getattr(each, side)[0].transpose(0, 1).contiguous() for each in layers]
            for side in ("keys", "values")
        )
        spans, last = (
            list(zip([0, *ends], ends, strict=False)),
            found.logits[0, -1].float().log_softmax(-1),
        )
        return Cached(Pool(keys, values), self._rotated(self._queries), spans, last, token_ids)

    def stored(self, cached: Cached, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Keys, un-rotated, and values of a piece:
        [num_layers, num_tokens, num_kv_heads, head_dim]."""
        at = torch.arange(*span)
        kv = cached.pool
        pool = Pool([each[at] for each in kv.k_buffer], [each[at] for each in kv.v_buffer])
        self._turn(pool, at, torch.zeros_like(at))
        return torch.stack(pool.k_buffer), torch.stack(pool.v_buffer)

    @torch.inference_mode()
    def restore(self, cached: Cached, span: tuple[int, int], kv: tuple[Tensor, Tensor]) -> None:
        """Write what `stored` gave, or what has become of it, into the pool at a piece's place."""
        at = torch.arange(*span)
        pool = Pool([*kv[0].clone()], [*kv[1]])
        self._turn(pool, torch.zeros_like(at), at)
        for mine, given in zip(cached.pool.k_buffer, pool.k_buffer, strict=True):
            mine[at] = given
        for mine, given in zip(cached.pool.v_buffer, pool.v_buffer, strict=True):
            mine[at] = given

    @torch.inference_mode()
    def log_probs(self, cached: Cached, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), vocab_size] float32: of the token after each of these,
        which follow the prompt."""
        # A new one for each call, since the model's forward appends its own tokens to it.
        past = DynamicCache()
        for layer, kv in enumerate(zip(cached.pool.k_buffer, cached.pool.v_buffer, strict=True)):
            past.update(*(each.transpose(0, 1).unsqueeze(0) for each in kv), layer)
        found: Tensor = (
            self._model(torch.tensor([[*token_ids]]), past_key_values=past)
            .logits[0]
            .float()
            .log_softmax(-1)
        )
        # The hook runs here as well: the list would grow with every call.
        self._queries = []
        return found

    def answer(self, cached: Cached, tail: str, *, max_tokens: int) -> tuple[list[int], list[int]]:
        """(the tail's token ids, those of the answer to it, its end included,
        by the largest probability)."""
        asked = self._tokenizer.encode(tail, add_special_tokens=False)
        answered: list[int] = []
        while len(answered) < max_tokens and answered[-1:] != [self._tokenizer.eos_token_id]:
            answered.append(int(self.log_probs(cached, [*asked, *answered])[-1].argmax()))
        return asked, answered

    def continued(self, cached: Cached, *, max_tokens: int) -> tuple[list[int], list[Tensor]]:
        """(token ids of the answer by the largest probability, its end included,
        log probabilities [vocab_size] of each)."""
        answered, steps = [int(cached.log_probs.argmax())], [cached.log_probs]
        while len(answered) < max_tokens and answered[-1] != self._tokenizer.eos_token_id:
            steps.append(self.log_probs(cached, answered)[-1])
            answered.append(int(steps[-1].argmax()))
        return answered, steps

    def text(self, token_ids: Sequence[int]) -> str:
        """Without special tokens."""
        found: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return found

    def token(self, token_id: int) -> str:
        """The token's own text."""
        found: str = self._tokenizer.decode([token_id])
        return found

    # Private, in order of use

    def _keep(self, _module: Any, _inputs: Any, output: Tensor) -> None:
        self._queries.append(output[0].unflatten(-1, (-1, self._table.rotary_dim)))  # type: ignore[no-untyped-call]

    def _rotated(self, queries: list[Tensor]) -> list[Tensor]:
        at = torch.arange(len(queries[0]))
        # As keys: what comes as values is not read.
        pool = Pool([each.clone() for each in queries], queries)
        self._turn(pool, torch.zeros_like(at), at)
        return pool.k_buffer

    def _turn(self, pool: Pool, old: Tensor, new: Tensor) -> None:
        """Keys of all slots, to other positions."""
        slots = torch.arange(len(old))
        KeyTurn(pool, self._table, old, slots, new)(range(len(pool.k_buffer)))
