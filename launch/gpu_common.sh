# Purpose: what the gpu_*.sh scripts share; they source it, with their own arguments.
#   OUT [--cpu-smoke] [options [-- flags of all servers]]
# Sets out (an absolute folder), smoke ("" or 1), options and flags (arrays), python, attention (flags of servers), and work (a
# folder that goes away); defines is_done, limited, free_gib, write_model. Python then finds the checkout, and SGLang the plugin,
# whether the package is installed or not.
#
# Environment:
#   LIMIT_S   seconds after which a step is interrupted (default 530, since servers take up to 60 to stop; 0: never). The script
#             then exits with 75, and the same command goes on.
#   PYTHON, GPU_ENV  as the scripts say
# shellcheck shell=bash disable=SC2034
name=$(basename "$0" .sh)
if (($# < 1)) || [[ $1 == -* ]]; then
    sed -n '2,/^set /{s/^# \{0,1\}//p}' "launch/$name.sh" >&2
    exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
smoke=
if [[ ${1:-} == --cpu-smoke ]]; then
    smoke=1
    shift
fi
options=()
while (($#)) && [[ $1 != -- ]]; do
    options+=("$1")
    shift
done
flags=("${@:2}")

if [[ -n ${GPU_ENV:-} ]]; then
    # shellcheck disable=SC1090
    . "$GPU_ENV"
    python=${PYTHON:-python3}
else
    if [[ -z ${PYTHON:-} ]]; then bash launch/setup.sh; fi
    python=${PYTHON:-.venv/bin/python}
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
PATH=$PATH:$(cd "$(dirname "$(command -v "$python")")" && pwd) # FlashInfer looks for ninja there
work=$(mktemp -d "${TMPDIR:-/tmp}/$name.XXXXXX")
trap 'rm -rf "$work"' EXIT

# SGLang finds the plugin by its entry points: where the package is not installed, they are written into a folder of the script's own.
if ! "$python" -c 'import importlib.metadata as m; m.distribution("sglang-chunkcache")' 2>/dev/null; then
    "$python" - "$work/site" <<'PY'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
info = Path(sys.argv[1]) / f"sglang_chunkcache-{project['version']}.dist-info"
info.mkdir(parents=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in project["entry-points"].items())
(info / "entry_points.txt").write_text("\n".join(groups))
PY
    export PYTHONPATH="$work/site:$PYTHONPATH"
fi

# SGLang takes FA3 by itself on Hopper. Its kernels are a gigabyte, which wheels that were carried to a machine lack.
attention=()
if [[ -z $smoke ]] && ! "$python" -c '
import sys, importlib.util as find, pathlib
kernels = find.find_spec("sgl_kernel")
sys.exit(not (kernels and list(pathlib.Path(kernels.origin).parent.glob("flash_ops*"))))'; then
    echo "$name: sgl_kernel has no FA3 here: FlashInfer attends" >&2
    attention=(--attention-backend flashinfer)
fi

# is_done FILE: a step has its result, which is told: a text, or the record of a complete run.
is_done() {
    if [[ $1 == */record.json ]]; then grep -qs '^ "complete": true' "$1"; else [[ -e $1 ]]; fi || return
    echo "$name: skipped, its result is in $1" >&2
}

# limited COMMAND: 75 where it is interrupted.
limited() {
    local limit=${LIMIT_S:-530} rc=0
    if ((limit == 0)); then
        "$@"
    elif ((SECONDS >= limit)); then
        return 75
    else
        timeout --foreground --signal=INT --kill-after=65 $((limit - SECONDS)) "$@" || rc=$?
        # what an interrupted command exits with is its own choice
        ((rc == 0 || SECONDS < limit)) || rc=75
        return $rc
    fi
}

# free_gib: of the first GPU's memory; what goes on in OUT has the pools that it began with.
free_gib() {
    [[ -s $out/free_gib ]] ||
        echo $(($(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits | head -n 1) / 1024)) >"$out/free_gib"
    cat "$out/free_gib"
}

# write_model FOLDER: a model of Llama-3-8B's shape without weights, for --load-format dummy (with --cpu-smoke a tiny one), and a
# tokenizer with a token for each word of eval/data/random_text.py.
write_model() {
    echo "$name: writing the model" >&2
    "$python" - "$1" "$smoke" <<'PY'
import json, sys
from pathlib import Path

from eval.random_model import SHAPES, write_random_model
from eval.data.random_text import WORDS

folder = write_random_model(Path(sys.argv[1]), SHAPES[1], [" ".join(WORDS)] * 50)
config = json.loads((folder / "config.json").read_text())
config["vocab_size"] = 128_256  # beyond the tokenizer's: its text is never read
if not sys.argv[2]:
    config |= {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
    }
(folder / "config.json").write_text(json.dumps(config))
(folder / "model.safetensors").unlink()
PY
}
