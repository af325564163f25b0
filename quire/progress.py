"""A progress bar for long work, on a terminal only; silent elsewhere and without `rich`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call once for each item done."""
    with progress_to(label, total) as show:
        done = itertools.count(1)
        yield lambda: show(next(done))


@contextmanager
def progress_to(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with the number of items done so far."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield lambda done: None
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)
