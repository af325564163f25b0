"""fetch: resolve a model by name, showing its download on stderr: a bar, or lines when piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Report = Callable[[str, int, int], None]  # what is happening, bytes done, bytes in all


def fetch(name: str) -> Path:
    from quire.load.hub import resolve_model

    with download_report() as report:
        return resolve_model(name, report)


@contextmanager
def download_report() -> Iterator[Report]:
    if sys.stderr.isatty():
        try:
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with _bar(Progress) as report:
                yield report
            return
    from quire.memory.sizing import size_text

    seen: set[str] = set()

    def say(what: str, done: int, total: int) -> None:
        if what not in seen:
            seen.add(what)
            size = f" ({size_text(total)})" if total else ""
            print(f"{what}{size} ...", file=sys.stderr)

    yield say


@contextmanager
def _bar(progress_class: type) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    # Nothing is drawn until there is something to report: a cached model stays silent.
    bar = progress_class(*columns, console=Console(stderr=True), transient=True)
    task = None

    def report(what: str, done: int, total: int) -> None:
        nonlocal task
        if task is None:
            bar.start()
            task = bar.add_task(what, total=total or None)
        bar.update(task, description=what, completed=done, total=total or None)

    try:
        yield report
    finally:
        bar.stop()
