"""in_order: the same work on many items by several threads, results in the order of the items.

Threads are a few items ahead of whoever takes the results, and no further. Whoever stops taking
stops the work. For work that leaves the interpreter's lock: digests, reads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

MOST_THREADS = 12
AHEAD = 3  # items begun for each thread


def num_threads() -> int:
    """Most of the cores, but not those that step and launch."""
    return max(2, min(MOST_THREADS, len(os.sched_getaffinity(0)) - 4))


def in_order(
    work: Callable[[Item], Made], items: Iterable[Item], name: str, threads: int | None = None
) -> Generator[Made, None, None]:
    """
    >>> list(in_order(str.upper, ["a", "b", "c"], "example"))
    ['A', 'B', 'C']
    """
    threads = threads or num_threads()
    with ThreadPoolExecutor(threads, name) as pool:
        begun: deque[Future[Made]] = deque()
        try:
            for item in items:
                begun.append(pool.submit(work, item))
                if len(begun) > AHEAD * threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for one in begun:
                one.cancel()
