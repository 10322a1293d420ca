#!/usr/bin/env bash
# Purpose: set up and run the tests. Arguments go to pytest: launch/test.sh tests/radix_ext -k order
# Machine: any; tests that need a GPU (-m gpu) or real data (CHUNKCACHE_DATA) are skipped where there is none.
# Minutes: about 9 on two cores with nothing else to do. The slow sweeps (launch/test.sh -m nightly) take about 30 more, and draw five times
#   the examples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh
# Test servers run next to pytest: without a limit each of them would start one thread per core.
half=$(($(nproc) / 2))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((half > 8 ? 8 : half > 1 ? half : 1))}
# Some extension modules warn when Python ends, after pytest's closing line, which should be the last.
export PYTHONWARNINGS="${PYTHONWARNINGS:+$PYTHONWARNINGS,}ignore:builtin type:DeprecationWarning"
# All tests: in three processes, since they often wait for servers and clocks.
if (($# == 0)); then set -- -n 3; fi
exec .venv/bin/python -m pytest "$@"
