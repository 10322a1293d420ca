"""`python -m eval quality MODE`: the effect of reuse on the answers.

    answers      a task through arms: right answers, and agreement with full prefill
    permutation  does the order of the chunks matter? (CRAFT figure 5)
    dedup        does it matter that a conversation does not show a chunk twice? (CRAFT figure 7)
    ratio        how much quality does recomputing a share of moved tokens restore? (FusionRAG
                 figures 17 and 18, Cache-Craft figure 26)
    joint        how much may KV blocks be fused before answers change? (Fast Fusion figures 4 and
                 5)

In all modes turns of one conversation, and questions that the same passages answer, are one block
of the bootstrap and of the paired t-test, because they are not independent samples. An interrupted
run is continued by the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from eval.quality.answers import Answers
from eval.quality.dedup import Dedup
from eval.quality.joint_curves import JointCurves
from eval.quality.mode import Mode, add_quality_options, measure
from eval.quality.permutation import Permutation
from eval.quality.ratio_curves import RatioCurves
from eval.serve.options import split_flags
from retrieval.command_line import Parser

MODES: tuple[type[Mode], ...] = (Answers, Permutation, Dedup, RatioCurves, JointCurves)


def main(argv: Sequence[str]) -> int:
    """Run one mode; returns the exit code."""
    parser = Parser(
        prog="python -m eval quality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    for mode in MODES:
        chosen = modes.add_parser(mode.name, help=mode.summary, description=mode.summary)
        add_quality_options(chosen)
        mode.add_options(chosen)
        chosen.set_defaults(run=partial(measure, mode))
    # argparse would take the servers' flags after -- for the mode's own.
    options, server_flags = split_flags(argv)
    args = parser.parse_args(options)
    args.server_flags = server_flags
    return int(args.run(args))
