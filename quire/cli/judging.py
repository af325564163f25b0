"""The report at the end of a pass: quality, bytes and speed beside quantisation, as table and PNG.

Shared by `quire prune`, `shrink` and `compress`. What is compared is `compress/beside.py`'s.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from quire.cli.parser import VerbParser, positive
from quire.cli.passes import print_report
from quire.cli.show import note, print_json, print_table
from quire.errors import NotSupported, QuireError

REPORT, PICTURE = "report.json", "report.png"  # in the folder that was written
ITEMS = 200  # most questions of a task


def add_report_flags(parser: VerbParser) -> None:
    parser.flag("--no-report", "do not judge what was written", action="store_true")
    parser.flag("--text", "UTF-8 text to judge on (default: newest speeches)", metavar="FILE")
    parser.flag("--tokens", "most tokens of that text", type=positive, default=4096, metavar="N")
    parser.flag("--window", "tokens judged as one", type=positive, default=1024, metavar="N")
    parser.flag("--tasks", "of arc-easy,piqa,sciq,hellaswag; or none", default="none")
    parser.flag("--beside", "other models to compare with, between commas", metavar="LIST")


def judge_and_show(args: Namespace, report: dict[str, Any]) -> int:
    """Print what came of a pass and, unless not asked for, how good it is."""
    found = None if args.no_report else _judged(args)
    if args.json:
        print_json({**report, "judged": found})
        return 0
    print_report(args.out, report)
    if found is not None:
        from quire.evaluate.report import table

        print_table(*table(found))
        for sentence in found["meaning"]:
            note(sentence)
    return 0


def _judged(args: Namespace) -> dict[str, Any] | None:
    """Writes and returns the report; None where it could not be made: the model is written all the
    same."""
    try:
        found = _judge(args)
    except QuireError as error:
        note(f"note: {args.out} is written, but could not be judged: {error}")
        return None
    (Path(args.out) / REPORT).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    from quire.evaluate.plot import plot_quality

    try:
        plot_quality(found, Path(args.out) / PICTURE)
    except NotSupported as error:
        note(f"note: no {PICTURE}: {error}")
    return found


def _judge(args: Namespace) -> dict[str, Any]:
    from quire.cli.download import download_report
    from quire.compress.beside import Beside
    from quire.evaluate.run import Work
    from quire.evaluate.tasks import parse_tasks, read_items
    from quire.evaluate.texts import HeldOut
    from quire.load.known_texts import CHOICES

    names = parse_tasks(args.tasks)
    with download_report() as progress:
        text = HeldOut.file(Path(args.text)) if args.text else HeldOut.known(progress)
        path = CHOICES.fetch(progress) if names else Path()
    tasks = {name: read_items(path, name, ITEMS) for name in names}
    work = Work(text, args.window, args.tokens, tasks, {"device": args.device})
    others = tuple(word for word in (args.beside or "").split(",") if word)
    return Beside(args.model, Path(args.out), others).judge(work, note)
