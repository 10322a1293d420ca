#!/usr/bin/env bash
# Purpose: any-position reuse as a GPU's user gets it, with SGLang's attention (FA3 on Hopper), prefill graphs and overlap, on
#   models of Llama-3-8B's shape (times, not quality):
#   gate    the start-up gate (everything recomputed must give full prefill's logits) on four layers with random weights, since
#           under dummy weights all logits are alike
#   8000 16000 27000  32 layers with dummy weights: time to first token against recompute ratio for chunks of so many tokens,
#           compared with stock SGLang. Interleaved; shares of full prefill with intervals.
#   launch/gpu_reuse.sh OUT [--cpu-smoke] [options of python -m eval bench reuse [-- flags of both servers]]
# OUT gets gate.txt, and of each length N N.txt (its last line is JSON) and the run's folder N/ with the servers' logs. A step
# that has its result is skipped, one that was interrupted goes on, by the same command.
# Machine: one NVIDIA GPU of 80 GB, nothing else on it: two servers of 16 GB of weights, KV pools of 24 GB and 6 GB.
# Minutes (H200, eager): 2 for the gate; for a length 1.5 to start both servers, then 1.5 for 8,000 tokens and 20 for 27,000
#   with 20 rounds, most of it preprocessing; with graphs starts are longer (not measured). After LIMIT_S the script exits with
#   75, and the same command goes on.
#   --cpu-smoke: the same steps with tiny sizes on any CPU, 5.
# Expected: at 15% from the device 1.9 times stock at 8,000 tokens (eval/results/2026-11-26T0408-reuse-h200), the more the longer.
#
# Environment:
#   PYTHON    interpreter with SGLang, FlashInfer and this package's dependencies (default: .venv by launch/setup.sh)
#   GPU_ENV   a file to source first, which installs or finds SGLang and FlashInfer; PYTHON is then python3 if not given
#   STEPS     "gate 8000 16000 27000" (default), some of them or other lengths
#   POOL      tokens in our KV pool, 128 KiB each (default: by the GPU's free memory, 190,000 of 80 GB); stock's is a quarter
#   LIMIT_S   seconds that one command runs (default 530; 0: no limit)
# Stock SGLang without its Rust tree core uses its Python tree: say so with any comparison.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. launch/gpu_common.sh
write_model "$work/model"
if [[ -n $smoke ]]; then
    server=()
    bench=(--pairs 2 --chunk-tokens 64 --max-total-tokens 30000 --threads 1)
else
    # Nothing returns to an exact chain here, and pinning takes time.
    server=("${attention[@]}" --cuda-graph-max-bs-decode 8 --mem-fraction-static 0.8 --chunkcache-host-mib 0)
    if [[ -z ${POOL:-} ]]; then
        # 15 GiB of weights twice, and 20 for graphs, activations and contexts; stock's pool is a quarter of ours.
        POOL=$((($(free_gib) - 50) * 8192 * 4 / 5))
        if ((POOL > 500000)); then POOL=500000; fi
        if ((POOL < 80000)); then
            echo "gpu_reuse: $(free_gib) GiB of the GPU's memory are free: too few" >&2
            rm "$out/free_gib" # there may be more the next time
            exit 2
        fi
    fi
    bench=(--chunk-tokens 500 --max-total-tokens "$POOL" --store-mib 6144 --start-limit-s 450)
fi
server+=("${flags[@]}")

write_gate_model() {
    "$python" - "$work/gate_model" "$smoke" <<'PY'
import sys
from pathlib import Path

from eval.random_model import SHAPES, Shape, write_random_model
from eval.data.random_text import WORDS

write_random_model(
    Path(sys.argv[1]), SHAPES[1] if sys.argv[2] else Shape(4096, 14_336, 4, 32, 8), [" ".join(WORDS)] * 50
)
PY
}

# run NAME ARGUMENTS: Python's output in OUT/NAME.txt.
run() {
    local to=$out/$1 rc=0
    limited "$python" -m "${@:2}" 2>"$to.log" | tee "$to.part" || rc=$?
    if ((rc == 0)); then
        mv "$to.part" "$to.txt"
    elif ((rc == 75)); then
        echo "gpu_reuse: the time is over; the same command goes on" >&2
        exit 75
    else
        echo "gpu_reuse: $1 failed ($rc), see $to.log: $(tail -n 1 "$to.log")" >&2
        exit "$rc"
    fi
}

if [[ -n $smoke ]]; then steps="gate 300"; else steps="gate 8000 16000 27000"; fi
for step in ${STEPS:-$steps}; do
    echo "gpu_reuse: $step" >&2
    if [[ $step == gate ]]; then
        if is_done "$out/gate.txt"; then continue; fi
        write_gate_model
        run gate sglang_chunkcache.check --model-path "$work/gate_model" "${server[@]}"
    elif [[ $step =~ ^[0-9]+$ ]]; then
        is_done "$out/$step.txt" ||
            run "$step" eval bench reuse --model-path "$work/model" --stock --logs "$out/$step" --out "$out/$step" \
                --tokens "$step" "${bench[@]}" "${options[@]}" -- --load-format dummy "${server[@]}"
    else
        echo "gpu_reuse: STEPS: expected gate or a number of tokens, got '$step'" >&2
        exit 2
    fi
done
