#!/usr/bin/env bash
# Purpose: make .venv and install everything into it; the other scripts here call this first.
#   launch/setup.sh
#   SGLANG_VERSION=0.5.21 VENV=.venv-0.5.21 launch/setup.sh
# Machine: Linux, Python 3.11 or newer; with an NVIDIA GPU (nvidia-smi works) the CUDA packages, else the short CPU list.
# Minutes: 3 to 10 the first time, depending on the network (10 to 20 with CUDA); under a second when nothing changed.
#
# Environment:
#   PYTHON            which Python to build .venv with (default: the first of python3, python3.13, .12, .11 that is new enough)
#   SGLANG_VERSION    another release of SGLang than 0.5.23; it brings its own versions of what it shares with us
#   VENV              another folder than .venv
#   CHUNKCACHE_SETUP  cpu or cuda, instead of looking for a GPU
#   CHUNKCACHE_EXTRAS of pyproject.toml, beside the machine's kind (default: retrieval,encoders,eval,dev)
#   TORCH_INDEX_URL   package index to take torch and torchvision from. On plain PyPI torch for Linux brings gigabytes of
#                     CUDA libraries; to get the CPU build, name PyTorch's CPU index here (https://pytorch.org shows it).
# Safe to run twice, at once, and after an install that was interrupted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The exact requirement that pyproject.toml has for a package.
pinned() { sed -n "s/.*\"\($1==[^\"]*\)\".*/\1/p" pyproject.toml | head -n 1; }

say() { echo "setup: $*" >&2; }

venv=${VENV:-.venv}
extras=${CHUNKCACHE_EXTRAS:-retrieval,encoders,page,eval,dev}
sglang=sglang==${SGLANG_VERSION:-0.5.23} # the newest that launch/matrix.sh finds green

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "need Python 3.11 or newer with its venv module (on Debian and Ubuntu: python3-venv)."
    say "found: $({ "${PYTHON:-python3}" --version 2>&1 || true; } | head -n 1). Name another one: PYTHON=/path/to/python3.12 $0"
    return 1
}

# pip without its progress and byte code, which it makes on one core only; what it printed comes out whole if it fails.
pip_install() {
    local log=$venv/setup.log
    say "installing $*"
    local options=(--no-input --no-compile --disable-pip-version-check --progress-bar off)
    if ! "$venv/bin/python" -m pip install "${options[@]}" "$@" >"$log" 2>&1; then
        cat "$log" >&2
        say "failed: pip install $*"
        return 1
    fi
}

kind=${CHUNKCACHE_SETUP:-}
if [[ -z $kind ]]; then
    kind=cpu
    if nvidia-smi -L >/dev/null 2>&1; then kind=cuda; fi
fi
if [[ $kind != cpu && $kind != cuda ]]; then
    say "CHUNKCACHE_SETUP must be cpu or cuda, got '$kind'"
    exit 2
fi

stamp="$kind $sglang $extras $(cat pyproject.toml launch/setup.sh | sha256sum | cut -d' ' -f1)"
is_done() { [[ -x $venv/bin/python && $(cat "$venv/setup.stamp" 2>/dev/null) == "$stamp" ]]; }
if is_done; then exit 0; fi

mkdir -p "$venv"
if command -v flock >/dev/null; then
    exec 9>"$venv/setup.lock"
    flock -n 9 || { say "waiting for another set-up to finish" && flock 9; }
    if is_done; then exit 0; fi
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip --version >/dev/null
fi

if [[ $kind == cuda ]]; then
    say "NVIDIA GPU: the CUDA packages are large, this takes 10 to 20 minutes"
    pip_install "$sglang" -e ".[cuda,$extras]"
else
    say "no NVIDIA GPU: the CPU packages, 3 to 10 minutes"
    if [[ -n ${TORCH_INDEX_URL:-} ]]; then
        pip_install --index-url "$TORCH_INDEX_URL" "$(pinned torch)" "$(pinned torchvision)"
    else
        say "TORCH_INDEX_URL is not set: if pip's index has no CPU build of torch, this brings gigabytes of CUDA libraries"
        pip_install "$(pinned torch)" # before its users, or one of them brings another
    fi
    pip_install --no-deps "$sglang" # with its dependencies it would bring CUDA packages
    # What SGLang asks of the packages that we do install. Torch is ours: one build serves all releases. Triton comes with torch's
    # CUDA build; here it is that of the torch that SGLang asks for, so that kernels are checked with the compiler that a GPU has.
    "$venv/bin/python" - >"$venv/sglang.constraints" <<'PY'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

TRITON = {"2.13.0": "3.7.1", "2.14.1": "3.8.0"}
for asked in map(Requirement, requires("sglang")):
    if asked.name == "torch" and not any(each.startswith("triton") for each in requires("torch")):
        print(*(f"triton=={triton}" for torch, triton in TRITON.items() if torch in asked.specifier))
    if (asked.marker is None or asked.marker.evaluate({"extra": ""})) and not asked.name.startswith("torch"):
        print(f"{asked.name}{asked.specifier}")
PY
    pip_install -c "$venv/sglang.constraints" -e ".[cpu,$extras]"
    pip_install -c "$venv/sglang.constraints" --no-deps flashinfer-python # compiled and checked without a GPU, too
fi
say "compiling"
# Not what is seldom imported, half of all files. Some templates and examples do not compile.
seldom='/(tests|anthropic|flashinfer|pip|fontTools|numba|transformers/models)/'
"$venv/bin/python" -W ignore -m compileall -qq -j 0 -x "$seldom" "$venv/lib" || true
echo "$stamp" >"$venv/setup.stamp"
say "done"
