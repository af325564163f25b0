"""quire compress: several passes over a model, one after the other, as a file says."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from quire.cli.judging import (
    add_report_flags,
    check_report_flags,
    judge_and_show,
    may_be_written,
)
from quire.cli.parser import VerbParser
from quire.cli.passes import progress
from quire.cli.show import note

EXAMPLES = """
quire compress smollm2-135m-instruct --recipe small.toml --out smollm2-small
quire evaluate smollm2-small --against smollm2-135m-instruct
"""


def build_parser() -> VerbParser:
    purpose = (
        "Run the passes of a recipe, in its order. A recipe is a TOML file with a [[step]] for\n"
        "each pass; its keys are the options of `quire quantize`, `prune` and `shrink` without\n"
        "their dashes. The same command goes on after a kill."
    )
    parser = VerbParser("compress", purpose, EXAMPLES, "MODEL --recipe FILE --out DIR")
    parser.add_argument("model", metavar="MODEL", help="name, folder or .gguf file")
    parser.flag("--recipe", "TOML file of steps", metavar="FILE", required=True)
    parser.flag("--out", "folder to write, or to go on with", metavar="DIR", required=True)
    parser.flag("--device", "auto, cpu or cuda", default="auto", choices=("auto", "cpu", "cuda"))
    parser.flag("--json", "the report as one JSON object", action="store_true")
    add_report_flags(parser)
    return parser


def run(args: Namespace) -> int:
    from quire.cli.download import fetch
    from quire.compress.recipe_file import read_plan

    check_report_flags(args)
    plan = read_plan(Path(args.recipe))
    fetch(args.model)
    from quire.compress.chain import Chain
    from quire.runner.device import pick_device

    chain = Chain(args.model, Path(args.out), plan, pick_device(args.device)[0])
    report = chain.finished() if may_be_written(args) else None
    if report is None:
        with progress("compressing") as listen:
            report = chain.run(listen)
    else:
        note(f"{args.out} is written already: it is judged")
    *before, last = report["steps"]
    for step in before:
        note(f"{step['method']}: {step['bytes'] / 1e6:.1f} MB, mean error {step['mean_error']:.2e}")
    return judge_and_show(args, {**last, **report})
