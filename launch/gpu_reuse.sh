#!/usr/bin/env bash
# Purpose: any-position reuse on a GPU with FlashInfer, on models of Llama-3-8B's shape (times, not quality):
#   the start-up gate (everything recomputed must give full prefill's logits) on four layers with random weights, since under
#   dummy weights all logits are alike; then, 32 layers with dummy weights, time to first token against recompute ratio at
#   8k, 16k and 27k tokens, compared with stock SGLang. Interleaved; shares of full prefill with intervals.
#   launch/gpu_reuse.sh OUT [--cpu-smoke] [options of python -m eval bench reuse [-- flags of both servers]]
# OUT gets gate.txt, bench.txt (its last line is JSON), the servers' logs, and the run's folder reuse/: what was interrupted goes on
# with the same command.
# Machine: one NVIDIA GPU of 140 GB, nothing else on it: two servers of 16 GB of weights, KV pools of 66 GB and 16 GB.
# Minutes (H200): 2 for the gate; 1.5 to start both servers, then 1.5 for 8,000 tokens and 20 for 27,000 with 20 rounds each, most
#   of it preprocessing. Where a command may run ten minutes only: STEPS=gate, then one --tokens a command, with --pairs 6 for 27,000.
#   --cpu-smoke: the same steps with tiny sizes on any CPU, 5.
# Expected: at 15% from the device 1.9 times stock at 8,000 tokens (eval/results/2026-11-26T0408-reuse-h200), the more the longer.
#
# Environment:
#   PYTHON    interpreter with SGLang, FlashInfer and this package's dependencies (default: .venv by launch/setup.sh)
#   GPU_ENV   a file to source first, which installs or finds SGLang and FlashInfer; PYTHON is then python3 if not given
#   STEPS     "gate bench" (default) or one of them
#   POOL      tokens in our KV pool (default 500000, 128 KiB each); stock's is a quarter
# Stock SGLang without its Rust tree core uses its Python tree: say so with any comparison.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. launch/gpu_common.sh
write_model "$work/model"
"$python" - "$work/gate_model" "$smoke" <<'PY'
import sys
from pathlib import Path

from eval.random_model import SHAPES, Shape, write_random_model
from eval.data.random_text import WORDS

write_random_model(
    Path(sys.argv[1]), SHAPES[1] if sys.argv[2] else Shape(4096, 14_336, 4, 32, 8), [" ".join(WORDS)] * 50
)
PY

if [[ -n $smoke ]]; then
    server=()
    bench=(--tokens 300 --pairs 2 --chunk-tokens 64 --max-total-tokens 30000 --threads 1)
else
    server=(--attention-backend flashinfer --disable-cuda-graph --mem-fraction-static 0.8)
    bench=(--tokens 8000 16000 27000 --chunk-tokens 500 --max-total-tokens "${POOL:-500000}" --store-mib 6144 --start-limit-s 560)
fi

server+=("${flags[@]}")

for step in ${STEPS:-gate bench}; do
    case $step in
        gate)
            echo "gpu_reuse: the gate" >&2
            "$python" -m sglang_chunkcache.check --model-path "$work/gate_model" "${server[@]}" 2>"$out/gate.log" | tee "$out/gate.part"
            mv "$out/gate.part" "$out/gate.txt"
            ;;
        bench)
            echo "gpu_reuse: time to first token" >&2
            "$python" -m eval bench reuse --model-path "$work/model" --stock --logs "$out" --out "$out/reuse" \
                "${bench[@]}" "${options[@]}" \
                -- --load-format dummy "${server[@]}" 2>"$out/bench.log" | tee "$out/bench.part"
            mv "$out/bench.part" "$out/bench.txt"
            ;;
        *)
            echo "gpu_reuse: STEPS: expected gate or bench, got '$step'" >&2
            exit 2
            ;;
    esac
done
