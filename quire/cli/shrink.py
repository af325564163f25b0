"""quire shrink: cut a model down to fewer layers, heads or channels."""

from __future__ import annotations

from argparse import Namespace

from quire.cli.judging import add_report_flags, run_and_judge
from quire.cli.parser import VerbParser, positive
from quire.cli.passes import add_pass_flags

EXAMPLES = """
quire shrink smollm2-135m-instruct --layers 24 --out smollm2-24-layers
quire shrink MODEL --mlp 1024 --kv-heads 2 --out DIR
quire shrink MODEL --hidden 512 --out DIR
quire distill MODEL --kind student --from DIR --out student
"""


def build_parser() -> VerbParser:
    purpose = (
        "Shrink a model: keep the layers, heads and channels that matter most to some text.\n"
        "What is written is an ordinary, smaller checkpoint of its family."
    )
    parser = VerbParser("shrink", purpose, EXAMPLES, "MODEL --out DIR")
    number = {"type": positive, "metavar": "N"}
    parser.flag("--layers", "that stay: those that turn the stream most", **number)
    parser.flag("--mlp", "channels of a feed-forward block that stay", **number)
    parser.flag("--heads", "of queries that stay, the same number for each kv head", **number)
    parser.flag("--kv-heads", "that stay, with their queries", **number)
    parser.flag("--hidden", "channels of the stream that stay", **number)
    parser.flag("--no-reconstruct", "do not fit what is left to the outputs", action="store_true")
    add_pass_flags(parser)
    add_report_flags(parser)
    return parser


def run(args: Namespace) -> int:
    from quire.compress.passes.recipe import Recipe

    recipe = Recipe(
        method="shrink",
        layers=args.layers,
        mlp=args.mlp,
        heads=args.heads,
        kv_heads=args.kv_heads,
        hidden=args.hidden,
        reconstruct=not args.no_reconstruct,
    )
    return run_and_judge(args, recipe, (), "shrinking")
