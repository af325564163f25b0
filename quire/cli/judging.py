"""The report at the end of a pass: quality, bytes and speed beside quantisation, as table and PNG.

Shared by `quire quantize`, `prune`, `shrink`, `compress` and, of students, `distill`. What is
compared is `compress/beside.py`'s. What can be known to be wrong is found before the pass.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.parser import VerbParser, positive
from quire.cli.passes import job_of, print_report, progress
from quire.cli.show import note, print_json, print_table
from quire.errors import QuireError

if TYPE_CHECKING:
    from quire.compress.passes.recipe import Recipe


def add_report_flags(parser: VerbParser, tokens: str = "--tokens", of: str = "") -> None:
    """`tokens` where that name has another meaning, `of` what alone is judged."""
    count = {"type": positive, "metavar": "N"}
    parser.flag("--no-report", f"do not judge what was written{of}", action="store_true")
    parser.flag("--text", "UTF-8 text to judge on (default: newest speeches)", metavar="FILE")
    parser.flag(tokens, "most tokens of that text", default=4096, dest="judged_tokens", **count)
    parser.flag("--window", "tokens judged as one", default=1024, **count)
    parser.flag("--tasks", "of arc-easy,piqa,sciq,hellaswag; or all, or none", default="none")
    parser.flag("--items", "most questions of a task", default=200, **count)
    parser.flag("--beside", "other models to compare with, between commas", metavar="LIST")


def check_report_flags(args: Namespace) -> None:
    """Raises BadRequest where the report that was asked for could not be made."""
    from quire.evaluate.tasks import parse_tasks

    if args.no_report:
        return
    parse_tasks(args.tasks)
    if args.text:
        from quire.evaluate.texts import HeldOut

        HeldOut.file(Path(args.text))


def run_and_judge(args: Namespace, recipe: Recipe, keep: tuple[str, ...], doing: str) -> int:
    """A pass and its report; of a folder in which the same pass is done, the report alone."""
    check_report_flags(args)
    job = job_of(args, recipe, keep)
    from quire.compress.finished import finished
    from quire.compress.pipeline import compress

    report = finished(job) if may_be_written(args) else None
    if report is None:
        with progress(doing) as listen:
            report = compress(job, listen)
    else:
        note(f"{args.out} is written already: it is judged")
    return judge_and_show(args, report)


def may_be_written(args: Namespace) -> bool:
    """Whether a folder that is written is no mistake: its report is missing, and asked for."""
    from quire.compress.beside import JUDGED

    return not args.no_report and not (Path(args.out) / JUDGED).exists()


def judge_and_show(args: Namespace, report: dict[str, Any]) -> int:
    """Print what came of a pass and, unless not asked for, how good it is."""
    found = judged(args, args.model)
    if args.json:
        print_json({**report, "judged": found})
    else:
        print_report(args.out, report)
        show_judged(found)
    save_judged(args, found)
    return 0


def judged(args: Namespace, original: str) -> dict[str, Any] | None:
    """None where it is not asked for, or cannot be made: the model is written all the same."""
    if args.no_report:
        return None
    try:
        return _judge(args, original)
    except QuireError as error:
        note(f"note: {args.out} is written, but could not be judged: {error}")
        return None


def show_judged(found: dict[str, Any] | None) -> None:
    if found is None:
        return
    from quire.evaluate.report import table

    print_table(*table(found))
    for sentence in found["meaning"]:
        note(sentence)


def save_judged(args: Namespace, found: dict[str, Any] | None) -> None:
    """Beside the weights, when it was shown already: a disk that is full loses nobody the numbers.
    Raises QuireError where the report cannot be written; a picture is only missed."""
    if found is None:
        return
    from quire.compress.beside import JUDGED, PICTURE
    from quire.compress.output import Output
    from quire.evaluate.plot import plot_quality

    out = Path(args.out)
    try:
        plot_quality(found, out / PICTURE)
    except QuireError as error:
        note(f"note: no {PICTURE}: {error}")
    Output(out, 0).write(JUDGED, json.dumps(found, indent=2).encode() + b"\n")


def _judge(args: Namespace, original: str) -> dict[str, Any]:
    from quire.cli.download import download_report, fetch
    from quire.compress.beside import Beside
    from quire.evaluate.run import Work
    from quire.evaluate.tasks import parse_tasks, read_items
    from quire.evaluate.texts import HeldOut
    from quire.load.known_texts import CHOICES

    names = parse_tasks(args.tasks)
    others = tuple(word for word in (args.beside or "").split(",") if word)
    for name in others:
        fetch(name)
    with download_report() as progress:
        text = HeldOut.file(Path(args.text)) if args.text else HeldOut.known(progress)
        path = CHOICES.fetch(progress) if names else Path()
    tasks = {name: read_items(path, name, args.items) for name in names}
    work = Work(text, args.window, args.judged_tokens, tasks, {"device": args.device})
    return Beside(original, Path(args.out), others).judge(work, note)
