#!/usr/bin/env bash
# Purpose: the plugin on every release of SGLang that it runs on, each in a folder of its own: the contracts with SGLang, the trees' models
# and a subset of the end-to-end tests (marked `matrix`). Prints a table; the exit code is 0 only if all pass.
#   launch/matrix.sh [RELEASE ...]
# Machine: two cores, no GPU; 2 GB of disk for each release.
# Minutes: 5 for each release, and 2 to 10 more the first time (see setup.sh, whose environment goes for this, too).
#
# Environment:
#   MATRIX_DIR  where .venv-RELEASE is made (default: the checkout)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# == 0)); then set -- 0.5.21 0.5.22 0.5.23; fi
tests=(tests/contract tests/e2e tests/sglang_chunkcache/{scheduler,fusion,test_compat.py})
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

failed=0 rows=("release|torch|passed|failed|skipped|seconds")
for release in "$@"; do
    venv=${MATRIX_DIR:-$PWD}/.venv-$release
    start=$SECONDS
    if ! SGLANG_VERSION=$release VENV=$venv CHUNKCACHE_SETUP=cpu bash launch/setup.sh; then
        rows+=("$release|set-up failed||||$((SECONDS - start))") failed=1
        continue
    fi
    log=$venv/matrix.log report=$venv/matrix.xml
    rm -f "$report"
    echo "matrix: $release" >&2
    "$venv/bin/python" -m pytest "${tests[@]}" -m "matrix and not nightly" --junitxml="$report" >"$log" 2>&1 ||
        { failed=1 && grep -E "^(FAILED|ERROR|E  )" "$log" >&2 || tail -n 20 "$log" >&2; }
    rows+=("$(
        "$venv/bin/python" - "$report" "$release" "$((SECONDS - start))" <<'PY'
import sys
import xml.etree.ElementTree as tree
from importlib.metadata import version

report, release, seconds = sys.argv[1:]
suite = next(tree.parse(report).getroot().iter("testsuite"))
run, skipped, *broken = (int(suite.get(name)) for name in ("tests", "skipped", "failures", "errors"))
bad = sum(broken)
print(release, version("torch"), run - skipped - bad, bad, skipped, seconds, sep="|")
PY
    )") || { rows+=("$release|no report||||$((SECONDS - start))") && failed=1; }
done
printf '%s\n' "${rows[@]}" | column -t -s '|'
exit "$failed"
