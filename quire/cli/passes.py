"""What the verbs that make smaller models share: flags, progress and the closing table."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bars import counted_bar
from quire.cli.main import did_you_mean
from quire.cli.parser import VerbParser, positive
from quire.cli.show import note, print_table
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.compress.calibration import Calibration
    from quire.compress.passes.recipe import Recipe
    from quire.compress.pipeline import Job, Progress

SHOWN = 6  # projections in the closing table


def add_pass_flags(parser: VerbParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name, folder or .gguf file")
    parser.flag("--out", "folder to write, or to go on with", metavar="DIR", required=True)
    parser.flag("--calibration", "UTF-8 text; default: the built-in one", metavar="FILE")
    parser.flag("--samples", "sequences of calibration text", type=positive, default=64)
    parser.flag("--length", "tokens of each", type=positive, default=512)
    parser.flag("--device", "auto, cpu or cuda", default="auto", choices=("auto", "cpu", "cuda"))
    parser.flag("--json", "the report as one JSON object", action="store_true")


def add_keep(parser: VerbParser, verb: str, usual: str) -> None:
    parser.flag(
        "--keep",
        f"projections left as they are, by name or pattern; none: all are {verb}"
        f" (default: {usual})",
        metavar="NAME,NAME",
    )


def share(text: str) -> float:
    """A number between 0 and 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0:
        raise ArgumentTypeError(f"got {text!r}, want a share above 0 and below 1, such as 0.5")
    return value


def check_method(method: str, known: Sequence[str]) -> None:
    if method not in known:
        raise BadRequest(f"unknown method {method!r}{did_you_mean(method, known)}")


def kept_of(words: str | None, method: str) -> tuple[str, ...]:
    if words is None:
        from quire.compress.methods import usually_kept

        return usually_kept(method)
    return tuple(word for word in words.split(",") if word and word != "none")


def calibration_of(args: Namespace) -> Calibration:
    from quire.compress.calibration import Calibration

    file = None if args.calibration is None else Path(args.calibration)
    return Calibration(args.samples, args.length, file)


def job_of(args: Namespace, recipe: Recipe, keep: tuple[str, ...]) -> Job:
    """With the model fetched."""
    from quire.cli.download import fetch

    fetch(args.model)
    from quire.compress.pipeline import Job
    from quire.runner.device import pick_device

    device = pick_device(args.device)[0]
    return Job(args.model, Path(args.out), recipe, calibration_of(args), keep, device)


@contextmanager
def progress(doing: str) -> Iterator[Callable[[Progress], None]]:
    """A bar with the time left and the error of each block; lines where there is no terminal."""
    if not sys.stderr.isatty():
        yield _Lines().tell
        return
    with counted_bar() as bar:
        task = bar.add_task(doing, total=None)

        def tell(made: Progress) -> None:
            bar.update(task, total=made.total, completed=made.done)
            bar.console.print(_line(made), style="dim")

        yield tell


class _Lines:
    def __init__(self) -> None:
        self._begun, self._fresh = time.perf_counter(), 0

    def tell(self, made: Progress) -> None:
        self._fresh += not made.is_resumed
        line = _line(made)
        if self._fresh and made.done < made.total:
            each = (time.perf_counter() - self._begun) / self._fresh
            line += f", about {each * (made.total - made.done):.0f} s left"
        note(line)


def _line(made: Progress) -> str:
    error = "" if made.error is None else f": error {made.error:.2e}"
    again = " (was there)" if made.is_resumed else ""
    return f"{made.done}/{made.total} {made.what}{error}{again}"


def print_report(out: str, report: dict[str, Any]) -> None:
    worst = sorted(report["projections"].items(), key=lambda item: -item[1]["error"])[:SHOWN]
    if worst:
        rows = [(name, f"{v['error']:.2e}", f"{v['range']:.3f}") for name, v in worst]
        print_table(("projection", "error", "range"), rows, "largest relative errors")
    for remark in report["remarks"]:
        note(f"note: {remark}")
    zeros = report.get("zeros", 0.0)
    note(
        f"{report['bytes'] / 1e6:.1f} MB in {report['seconds']:.0f} s,"
        f" mean error {report['mean_error']:.2e}"
        + (
            f", {100 * zeros:.1f} % zeros"
            if report.get("pattern") or report.get("sparsity")
            else ""
        )
    )
    print(out)
