#!/usr/bin/env bash
# Purpose: time to first token of our server and of stock SGLang, same requests, interleaved; a ratio above 1 means ours is faster.
#   launch/compare_stock.sh DATA [ragpulse|mtrag|fresh] [options of python -m eval serve]
# DATA is a folder with ragpulse/ and mtrag/ (their format: eval/tasks/). fresh: ragpulse with every chunk made unique, which
# measures what our cache costs if there is nothing to reuse.
# Machine: nothing else running on it; two cores are enough, three servers share them one at a time.
# Minutes: about 10 for 80 measured requests after 40 to warm up.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# < 1)); then
    sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
data=$1 load=${2:-ragpulse}
shift $(($# < 2 ? $# : 2))
case $load in
    ragpulse | mtrag) options=(--task "$load") ;;
    fresh) options=(--task ragpulse --fresh) ;;
    *)
        echo "compare_stock.sh: expected ragpulse, mtrag or fresh, got '$load'" >&2
        exit 2
        ;;
esac
bash launch/setup.sh
exec .venv/bin/python -m eval serve "${options[@]}" --data "$data" --scale 4 --params 100 --threads "$(nproc)" \
    --arms stock-lpm stock-python-tree ours --requests 120 --warm-up 40 --block 1 --max-new-tokens 8 "$@"
