"""quire evaluate: how good a model is, what it costs, and how far it is from another."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.engine_flags import (
    add_engine_flags,
    add_model,
    checked_args,
    engine_options,
    model_of,
)
from quire.cli.parser import VerbParser, positive, whole
from quire.cli.show import note, print_json, print_table
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.evaluate.arms import Arm
    from quire.evaluate.run import Work

EXAMPLES = """
quire evaluate
quire evaluate ./quantised --against ./original --window 4096
quire evaluate default --sweep fp32,packed,rtn-int8-g32,rtn-int4-g32 --plot quality.png
quire evaluate qwen2.5-coder-0.5b-instruct --text held-out.txt --tasks none --json
"""


def build_parser() -> VerbParser:
    purpose = (
        "Judge a model: perplexity of held-out text, distance to a reference, questions with a\n"
        "choice of answers; bytes on disk and in memory, decode speed. Numbers after ± are\n"
        "standard errors."
    )
    parser = VerbParser("evaluate", purpose, EXAMPLES, "[MODEL]")
    add_model(parser)
    flag = parser.flag
    flag("--against", "the reference: a model, or a form of this one (fp32)", metavar="MODEL")
    flag(
        "--sweep",
        "several forms or models, between commas; the first is the reference without --against",
        metavar="LIST",
    )
    flag("--text", "UTF-8 text to score (default: newest speeches, fetched)", metavar="FILE")
    flag("--tokens", "most tokens of the text", type=positive, default=8192, metavar="N")
    length = whole(2, 1 << 24)
    flag("--window", "tokens scored as one context", type=length, default=2048, metavar="N")
    flag("--tasks", "of arc-easy,piqa,sciq,hellaswag; or all, or none", default="arc-easy,piqa")
    flag("--items", "most questions of a task", type=positive, default=200, metavar="N")
    flag("--plot", "write quality against size as a PNG", metavar="FILE")
    flag("--json", "one JSON object", action="store_true")
    add_engine_flags(parser)
    return parser


def run(args: Namespace) -> int:
    arms, against = _arms(args)
    checked_args(args)
    from quire.evaluate.report import report, table
    from quire.evaluate.run import run as run_arms

    work = _work(args)
    if args.plot:
        from quire.picture import check_picture

        check_picture(Path(args.plot))
    found = report(run_arms(arms, against, work, note), work)
    if args.json:
        print_json(found)
    else:
        print_table(*table(found))
    if args.plot:
        from quire.evaluate.plot import plot_quality

        plot_quality(found, Path(args.plot))
    return 0


def _arms(args: Namespace) -> tuple[list[Arm], Arm | None]:
    """With the models they name fetched, and forms checked before anything is."""
    from quire.cli.download import fetch
    from quire.evaluate.arms import Arm, parse_arm, parse_sweep

    model = model_of(args)
    arms = parse_sweep(args.sweep, model) if args.sweep else [Arm(Path(model).name, model)]
    against = parse_arm(args.against, model) if args.against else None
    if args.sweep and against is None:
        against = arms[0] if len(arms) > 1 else None
    if against is not None and not args.sweep and against == arms[0]:
        raise BadRequest(f"got {args.against!r} against itself; name another model or form")
    for name in {arm.model for arm in (*arms, *([against] if against else []))}:
        fetch(name)
    return arms, against


def _work(args: Namespace) -> Work:
    from quire.cli.download import download_report
    from quire.evaluate.run import Work
    from quire.evaluate.tasks import parse_tasks, read_items
    from quire.evaluate.texts import HeldOut
    from quire.load.known_texts import CHOICES

    names = parse_tasks(args.tasks)
    with download_report() as progress:
        text = HeldOut.file(Path(args.text)) if args.text else HeldOut.known(progress)
        path = CHOICES.fetch(progress) if names else Path()
    tasks = {name: read_items(path, name, args.items) for name in names}
    return Work(text, args.window, args.tokens, tasks, engine_options(args))
