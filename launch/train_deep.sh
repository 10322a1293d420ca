#!/usr/bin/env bash
# Purpose: train a deeper bundled model, eight layers, and measure which kinds of question it answers: launch/train_deep.sh DIR [MINUTES]
#   Selectors are judged on what a model answers at full prefill; four layers answer neither contradictions nor what comes after a passage.
#   Nothing is replaced: whoever ships DIR looks at the figures first, and at its size (4 MB; 10 are too much).
# Machine: any, one core.
# Minutes: two hours, or twice MINUTES.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:?a directory for the weights} minutes=${2:-60}
bash launch/setup.sh
.venv/bin/python -m eval.world.train --layers 8 --minutes "$minutes" --out "$out/facts"
.venv/bin/python -m eval.world.train --init "$out/facts" --minutes "$minutes" --out "$out"
.venv/bin/python -m eval bench bundled-model --model-path "$out" --chunks 4 --questions 100
