"""quire prune: set weights of a model to zero, and fit the others to what it computed before."""

from __future__ import annotations

from argparse import Namespace

from quire.cli.judging import add_report_flags, run_and_judge
from quire.cli.parser import VerbParser
from quire.cli.passes import add_keep, add_pass_flags, check_method, kept_of, share

EXAMPLES = """
quire prune smollm2-135m-instruct --method sparsegpt --pattern 2:4 --out smollm2-24
quire prune MODEL --method wanda --sparsity 0.3 --out DIR
quire prune MODEL --method magnitude --no-reconstruct --out DIR     needs no text, takes seconds
quire evaluate DIR --against MODEL
"""


def build_parser() -> VerbParser:
    from quire.compress.methods import PRUNERS

    purpose = (
        "Prune a model: weights that matter least become zero, and the others make up for it.\n"
        "What is written is an ordinary checkpoint of the same shape; of 2:4 the kept weights and\n"
        "their places, 9 bits for 16."
    )
    parser = VerbParser("prune", purpose, EXAMPLES, "MODEL --method METHOD --out DIR")
    parser.flag("--method", ", ".join(PRUNERS.entries), metavar="METHOD", required=True)
    parser.flag("--sparsity", "share of weights that go (default: 0.5)", type=share, metavar="S")
    parser.flag("--pattern", "keep N of every M inputs, such as 2:4", metavar="N:M")
    parser.flag("--no-reconstruct", "leave weights as the method left them", action="store_true")
    parser.flag(
        "--plain", "2:4: store zeros too, for readers that know no 2:4", action="store_true"
    )
    add_keep(parser, "pruned", "lm_head")
    add_pass_flags(parser)
    add_report_flags(parser)
    return parser


def run(args: Namespace) -> int:
    from quire.compress.methods import PRUNERS

    check_method(args.method, list(PRUNERS.entries))
    from quire.compress.passes.recipe import Recipe

    recipe = Recipe(
        method=args.method,
        sparsity=args.sparsity,
        pattern=args.pattern,
        reconstruct=not args.no_reconstruct,
        plain=args.plain,
    )
    return run_and_judge(args, recipe, kept_of(args.keep, args.method), "pruning")
