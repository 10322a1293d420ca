#!/usr/bin/env bash
# Purpose: attention of scattered tokens and moving of KV on a GPU: the tests that need one, then how fast ours are.
#   tests      pytest -m gpu: every kernel against the reference, then gate, passes, codecs and host pool, on the device,
#              then a server whose free slots hold NaN
#   bench      eval bench attention: ours (FA2, FA3) next to dense FA2 and FA3, SDPA with a mask, virtual
#              sequences and FlashInfer's mask; ratios 0.02 to 1, 8k to 32k tokens, batches of 1 to 8, interleaved
#   relocate   eval bench relocate: the fused copy of chunks against the device's copy rate
#   launch/gpu_attention.sh OUT [--cpu-smoke] [options of python -m eval bench attention [-- options of pytest]]
# OUT gets tests*.txt, attention.txt and relocate.txt (the last lines of these two are JSON), a .log for each (a .part is the
# text of a step that failed), and the runs' folders attention/ and relocate/, which the same command goes on with.
# A step that fails is told, and the others go on. One that has its result is skipped: another OUT measures again.
# Machine: one NVIDIA GPU of 80 GB, Hopper for FA3, nothing else on it; nvcc, since FlashInfer compiles.
# Minutes (H200, 16 cores): tests 6 for bfloat16 with 128 dimensions, then four times 5 for other types and sizes, and for passes
#   (estimated), most of it compiling, or one run with options of pytest; bench 30 to 45 (estimated); relocate 9. After LIMIT_S
#   the script exits with 75, and the same command goes on.
#   --cpu-smoke: the same steps with tiny sizes on any CPU, 2; the tests are then all skipped.
# Expected: at 15% and 32k at least 5x over FA3 dense and 70% of its rate per needed FLOP; copying at 80% of the device's
#   rate. eval/results/2026-11-26T0408-attention-h200 and -T0407-relocate-h200 have 5.27 times, 78% and 77%.
#
# Environment:
#   PYTHON    interpreter with torch, FlashInfer, pytest, hypothesis and this package's dependencies (default: .venv by setup.sh)
#   GPU_ENV   a file to source first, which installs or finds FlashInfer; PYTHON is then python3 if not given
#   STEPS     "tests bench relocate" (default) or some of them
#   LIMIT_S   seconds that one command runs (default 530; 0: no limit)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set /{s/^# \{0,1\}//p}' launch/gpu_attention.sh
    exit
fi
. launch/gpu_common.sh
device=cuda attention=() relocate=() failed=0
kernels=(
    tests/sglang_chunkcache/attention/test_flashinfer_gpu.py
    tests/sglang_chunkcache/fusion/test_relocate.py
    tests/sglang_chunkcache/fusion/test_relocate_kernel.py
)
passes=(
    tests/sglang_chunkcache/test_other_device.py
    tests/sglang_chunkcache/attention/test_lse.py
    tests/sglang_chunkcache/fusion/test_store.py
    tests/sglang_chunkcache/storage/test_codec.py
)
graphs=tests/sglang_chunkcache/fusion/test_pass_graphs.py # a model runner of its own
server=tests/e2e/test_reuse.py
if [[ -n $smoke ]]; then
    device=cpu attention=(--quick --repetitions 2) relocate=(--quick)
fi
trap 'echo "gpu_attention: interrupted; the same command goes on" >&2; exit 130' INT

# run NAME ARGUMENTS: Python's output in OUT/NAME.txt, where a step that fails leaves the old text.
run() {
    local to=$out/$1 rc=0 said=$out/$1.log
    echo "gpu_attention: $1" >&2
    limited "$python" -m "${@:2}" 2>"$to.log" | tee "$to.part" || rc=$?
    if ((rc == 0)); then
        mv "$to.part" "$to.txt"
        return
    elif ((rc == 75)); then
        echo "gpu_attention: the time is over; the same command goes on" >&2
        exit 75
    fi
    failed=$rc
    if [[ ! -s $to.part ]]; then
        rm "$to.part"
    elif [[ $1 == tests* ]]; then
        said=$to.part # pytest reports there
    fi
    echo "gpu_attention: $1 failed ($rc), see $said: $(tail -n 1 "$said")" >&2
}

# bench NAME OPTIONS: a run's folder OUT/NAME, once.
bench() {
    is_done "$out/$1.txt" || run "$1" eval bench "$1" --device $device --out "$out/$1" "${@:2}"
}

# pytest_gpu NAME FILES AND OPTIONS: once.
pytest_gpu() {
    is_done "$out/$1.txt" || run "$1" pytest -m gpu -rs "${@:2}"
}

for step in ${STEPS:-tests bench relocate}; do
    case $step in
        tests)
            if [[ -n $smoke ]] || ((${#flags[@]})); then
                pytest_gpu tests "${kernels[@]}" "${passes[@]}" "${flags[@]}"
                pytest_gpu tests_graphs $graphs
                pytest_gpu tests_server $server
            else # FlashInfer compiles for each type and head size
                pytest_gpu tests_bf16_128 "${kernels[@]}" -k "bfloat16-128 or not float16"
                pytest_gpu tests_bf16_64 "${kernels[@]}" -k "bfloat16-64"
                pytest_gpu tests_passes "${passes[@]}" # of bfloat16 with 64 dimensions
                pytest_gpu tests_graphs $graphs
                pytest_gpu tests_server $server
                pytest_gpu tests_fp16_64 "${kernels[@]}" -k "float16-64 and not bfloat16-64"
                pytest_gpu tests_fp16 "${kernels[@]}" -k "float16 and not bfloat16-128 and not float16-64"
            fi
            ;;
        bench) bench attention "${attention[@]}" "${options[@]}" ;;
        relocate) bench relocate "${relocate[@]}" ;;
        *)
            echo "gpu_attention: STEPS: expected tests, bench or relocate, got '$step'" >&2
            exit 2
            ;;
    esac
done
exit $failed
