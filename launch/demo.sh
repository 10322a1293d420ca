#!/usr/bin/env bash
# Purpose: see it work: set up, index some passages, start the server on the bundled model, send RAG traffic, print what was
#   reused, stop.
#   launch/demo.sh [options of `python -m eval demo`, for example --requests 200]
# Machine: any with Linux and Python 3.11 or newer; two cores and 4 GB of memory do, no GPU needed.
# Minutes: about 2, plus the set-up the first time (see setup.sh).
# Exit code: 0 if chunks were reused and the model answered from them, else 1; 2 for a wrong option.
#
# Environment:
#   DEMO_MODEL   another model to serve, a path as for --model-path; its answers are shown but not judged
#   DEMO_FLAGS   more flags for the server, for example "--dp-size 2 --chunkcache-order retriever"
#   PORT         port to listen on (default: a free one)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

START_LIMIT_S=300

bash launch/setup.sh
for option; do
    if [[ $option == -h || $option == --help ]]; then exec .venv/bin/python -m eval demo --help; fi
done
model=${DEMO_MODEL:-bundled}
python=.venv/bin/python
port=${PORT:-$($python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
url=http://127.0.0.1:$port
scratch=$(mktemp -d "${TMPDIR:-/tmp}/chunkcache-demo.XXXXXX")
log=$scratch/server.log
server=

stop_server() {
    local code=$?
    trap - EXIT INT TERM
    if [[ -n $server ]] && kill -0 "$server" 2>/dev/null; then
        kill -TERM "$server" 2>/dev/null || true # it stops its own processes, except while it starts
        for _ in $(seq 100); do kill -0 "$server" 2>/dev/null || break; sleep 0.1; done
        kill -KILL -- "-$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    if ((code == 0)); then rm -rf "$scratch"; else echo "demo: failed; the server's log is in $log" >&2; fi
    exit "$code"
}
trap stop_server EXIT
trap 'exit 130' INT TERM

flags=()
demo=()
if [[ $model == bundled ]]; then
    echo "demo: building an index of the demo's passages" >&2
    $python -m eval demo --write-corpus "$scratch/passages.jsonl" "$@"
    $python -m retrieval build "$scratch/passages.jsonl" --no-split --out "$scratch/index" >&2
    flags=(--index "$scratch/index")
    demo=(--retrieve 20)
else
    demo=(--any-answer) # the passages are the bundled model's world
fi
echo "demo: starting the server on port $port" >&2
# A process group of its own, so that all of the server's processes can be stopped.
# shellcheck disable=SC2086
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} setsid $python -m sglang_chunkcache.launch_server --model-path "$model" \
    --host 127.0.0.1 --port "$port" --skip-server-warmup --log-level warning "${flags[@]}" ${DEMO_FLAGS:-} >"$log" 2>&1 </dev/null &
server=$!

healthy() { $python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)' "$url/ready" 2>/dev/null; }
SECONDS=0 next_line_s=15
until healthy; do
    if ! kill -0 "$server" 2>/dev/null; then
        tail -n 40 "$log" >&2
        echo "demo: the server stopped after $SECONDS s" >&2
        exit 1
    fi
    if ((SECONDS > START_LIMIT_S)); then
        tail -n 40 "$log" >&2
        echo "demo: the server was not ready after $START_LIMIT_S s" >&2
        exit 1
    fi
    if [[ -t 2 ]]; then
        printf '\rdemo: waiting for the server, %s s ' "$SECONDS" >&2
    elif ((SECONDS >= next_line_s)); then
        echo "demo: waiting for the server, $SECONDS s" >&2
        next_line_s=$((SECONDS + 15))
    fi
    sleep 0.5
done
if [[ -t 2 ]]; then printf '\r' >&2; fi
echo "demo: the server is ready after $SECONDS s" >&2

$python -m eval demo --url "$url" "${demo[@]}" "$@"
echo "demo: to go on: .venv/bin/sglang-chunkcache serve --model-path $model; what is reused is shown at http://127.0.0.1:30000/chunkcache/" >&2
