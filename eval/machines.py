"""What machines and models are made of, for figures by arithmetic: bytes, floating point
operations, rates, and what a host takes. No kernel was timed for them: shares are estimates.
`python -m eval roofline` shows how far they are from an H200's records.

    seconds = operations / (peak * share)       bytes / (bandwidth * share)
"""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """One GPU and its bus. Peaks are the data sheet's, shares of them are what is reached."""

    flops: float
    """Of dense bfloat16, a second."""
    memory_bytes_s: float
    """Of HBM or GDDR6."""
    bus_bytes_s: float
    """Of PCIe, one way: what host memory gives and takes."""
    memory_bytes: int
    source: str
    has_fa3: bool = False
    """FlashAttention-3 runs on it: Hopper."""


MACHINES = {
    "h100": Machine(989e12, 3.35e12, 64e9, 80 * 10**9, "NVIDIA H100 SXM5 data sheet", has_fa3=True),
    "h200": Machine(989e12, 4.8e12, 64e9, 141 * 10**9, "NVIDIA H200 SXM data sheet", has_fa3=True),
    "a100": Machine(312e12, 2.04e12, 32e9, 80 * 10**9, "NVIDIA A100 80GB SXM4 data sheet"),
    "l40s": Machine(362e12, 0.864e12, 32e9, 48 * 10**9, "NVIDIA L40S data sheet"),
}
GEMM_SHARE = 0.65
"""Of the peak, in large matrix products: cuBLAS reaches .6 to .75 on an H100."""
ATTENTION_SHARE = 0.60
"""In causal attention with heads of 128: FlashAttention-3 reports up to .75 (its figure 5)."""
SCATTERED_SHARE = 0.45
"""In attention of scattered tokens, whose tiles have masked corners: an estimate."""
MEMORY_SHARE = 0.80
"""Of the memory's bandwidth, in reading weights and copying KV."""
BUS_SHARE = 0.86
"""Of PCIe's, from pinned memory: 55 of 64 GB/s."""
MASKED_SHARE = 0.30
"""In attention with a mask, of which PyTorch leaves nothing out: an estimate."""
LAUNCH_S = 25e-6
"""Host time of a launch, with the Python before it, in a pass of ours, which no CUDA graph replays:
an estimate. A layer of the sparse pass then takes .25 ms."""
LAYER_LAUNCHES = 10
"""Of a layer of the sparse pass: two norms, four products, rotary, activation, KV written,
attention (tests/eval/test_roofline_counts.py counts them)."""
GRAPH_LAYER_S = 50e-6
"""Host time of a layer of SGLang's breakable prefill graph, attention outside it: an estimate."""
WAIT_S = 50e-6
"""Until the host goes on after it has waited for the device: an estimate."""


CODEC_BITS = {"none": 16, "int8": 8, "int4": 4}
"""Of a number, by the codec that KV is kept in."""


class Shape(NamedTuple):
    """A decoder with grouped heads and a gated MLP, in bfloat16; as its config.json says."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """Of all layers."""
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * self.hidden * (heads + 3 * self.intermediate)

    @property
    def weight_bytes(self) -> int:
        """Read by each forward, with the rows of the output."""
        return 2 * (self.weights + self.hidden * self.vocabulary)

    @property
    def token_flops(self) -> int:
        """Of one token through all layers, but for attention."""
        return 2 * self.weights

    @property
    def pair_flops(self) -> int:
        """Of one query and one key, in all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def token_bytes(self, codec: str = "none") -> int:
        """Of one token's KV: with a codec whole numbers and a scale in bfloat16 for each head."""
        head = self.head_dim * CODEC_BITS[codec] // 8 + (0 if codec == "none" else 2)
        return 2 * self.num_layers * self.num_kv_heads * head


SHAPES = {
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14_336, 128_256),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18_944, 152_064),
    "qwen3-4b": Shape(36, 2560, 32, 8, 128, 9_728, 151_936),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12_288, 151_936),
    "qwen3-32b": Shape(64, 5120, 64, 8, 128, 25_600, 151_936),
}
