#!/usr/bin/env bash
# Purpose: time to first token of our server and of stock SGLang, same requests, interleaved; a ratio above 1 means ours is faster.
#   launch/compare_stock.sh DATA [ragpulse|mtrag|fresh] [options of python -m eval.bench.ttft]
# DATA is a folder with ragpulse/ and mtrag/ (their format: eval/bench/ttft.py, eval/tasks/).
# Machine: nothing else running on it; two cores are enough, three servers share them one at a time.
# Minutes: about 10 for 80 measured requests after 160 to warm up.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# < 1)); then
    sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
data=$1 load=${2:-ragpulse}
shift $(($# < 2 ? $# : 2))
bash launch/setup.sh
exec .venv/bin/python -m eval.bench.ttft --data "$data" --load "$load" --threads "$(nproc)" "$@"
