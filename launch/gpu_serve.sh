#!/usr/bin/env bash
# Purpose: time to first token as a GPU's user gets it, with SGLang's attention (FA3 on Hopper), graphs and overlap, policy by
#   policy, under a RAG service's load: the requests of the RAGPulse trace at their full length, at several Poisson rates, a model
#   of Llama-3-8B's shape with dummy weights (times, not quality).
#   Stock SGLang with lpm is an arm of every run, since only interleaved arms are compared. Dummy weights write no text, so there
#   are no times between output tokens of the measured requests; --bystanders 4 measures those of plain requests beside them.
#   launch/gpu_serve.sh OUT [--cpu-smoke] --data DIR [options of python -m eval serve [-- flags of all servers]]
# DIR has ragpulse/ (format: eval/tasks/ragpulse.py). OUT gets one run a step, step<n>/ with record.json, samples and the servers'
# logs, and step<n>.txt, whose last line is JSON. A step that has its result is skipped, one that was cut off goes on, by the same
# command.
# Machine: one NVIDIA GPU of 80 GB or more, nothing else on it. As many servers side by side as leave each a KV pool of 12 GiB or
#   more (98,000 tokens; a request in flight takes 3,700): two on 80 GB, four on 140 GB. Each step is stock-lpm and the next arms.
# Minutes (H200, no prefill graphs): 1.5 to start each server, one after the other, and ours pins host memory for up to 1 more;
#   then a second for three requests of an arm. After LIMIT_S the script exits with 75, and the same command goes on.
#   --cpu-smoke: the first step with tiny sizes on any CPU, 3.
# Expected: at 6 requests a second ours 1.1 (median) to 1.3 times (mean) as fast as stock-lpm (eval/LOG.md).
#
# Environment:
#   PYTHON    interpreter with SGLang, FlashInfer and this package's dependencies (default: .venv by launch/setup.sh)
#   GPU_ENV   a file to source first, which installs or finds SGLang and FlashInfer; PYTHON is then python3 if not given
#   ARMS      what is compared with stock-lpm (default "ours craft no-cache stock-fcfs fused")
#   RATES     requests per second (default "2 4 6"; a GPU of this kind computes about 7 such prompts a second)
#   REQUESTS  at each rate, the first 40 of them to warm up (default 160)
#   SERVERS   side by side (default: by the GPU's memory)
#   STEPS     which steps, from 1 (default: all; SERVERS - 1 arms each)
#   LIMIT_S   seconds that one command runs (default 530; 0: no limit)
# Stock SGLang without its Rust tree core uses its Python tree: say so with any comparison.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/gpu_common.sh
write_model "$work/model"

read -ra arms <<<"${ARMS:-ours craft no-cache stock-fcfs fused}"
read -ra rates <<<"${RATES:-2 4 6}"
load=(--load poisson --rates "${rates[@]}" --k 100 --ignore-eos)
if [[ -n $smoke ]]; then
    per_step=${SERVERS:-3}
    load+=(--requests "${REQUESTS:-12}" --warm-up 4 --block 4 --scale 20 --threads 1 --max-total-tokens 20000)
    server=(--load-format dummy)
else
    gib=$(($(free_gib) * 97 / 100))
    per_step=${SERVERS:-$((gib / 33))}
    # more of them take longer to start than a step may
    if [[ -z ${SERVERS:-} ]] && ((per_step > 3 && ${LIMIT_S:-530})); then per_step=3; fi
    pool=$(((gib / per_step - 21) * 8192)) # 15 GiB of weights, 6 of everything else; 128 KiB a token
    load+=(--requests "${REQUESTS:-160}" --warm-up 40 --block 15 --max-total-tokens "$pool")
    server=(--load-format dummy "${attention[@]}" --mem-fraction-static 0.9 --cuda-graph-max-bs-decode 32)
fi
if ((per_step < 2)); then
    echo "$name: need memory for two servers, there is enough for $per_step" >&2
    rm -f "$out/free_gib" # there may be more the next time
    exit 2
fi

num_steps=$(((${#arms[@]} + per_step - 2) / (per_step - 1)))
for step in ${STEPS:-$(if [[ -n $smoke ]]; then echo 1; else seq "$num_steps"; fi)}; do
    if [[ ! $step =~ ^[0-9]+$ ]] || ((step < 1 || step > num_steps)); then
        echo "$name: STEPS: expected 1 to $num_steps, got '$step'" >&2
        exit 2
    fi
    others=("${arms[@]:(step - 1) * (per_step - 1):per_step - 1}")
    echo "$name: step $step: stock-lpm ${others[*]}" >&2
    if is_done "$out/step$step/record.json"; then continue; fi
    rc=0
    limited "$python" -m eval serve --task ragpulse --model-path "$work/model" --arms stock-lpm "${others[@]}" \
        --out "$out/step$step" "${load[@]}" "${options[@]}" -- "${server[@]}" "${flags[@]}" | tee "$out/step$step.txt" || rc=$?
    if ((rc == 75)); then echo "$name: the time is over; the same command goes on" >&2; fi
    if ((rc)); then exit $rc; fi
done
