"""Shared contexts: tokens of a step's contexts that a GPU reads for several decodes at once.

Decodes behind the same pages are neighbours in their step (`sched/neighbours.py`), and attention
reads those pages once for all of them. CPUs read them for each.
"""

from __future__ import annotations

from quire.kv.manager import KVManager
from quire.step import StepPlan


def shared_context(plan: StepPlan, kv: KVManager) -> int:
    """Of all contexts together, how many tokens need not be read again."""
    if not plan.shares_prefix:
        return 0
    held, total, before = kv.look(), 0, tuple[int, ...]()
    for work in plan.works:
        pages = held[work.request_id].tables[0]
        total += min(work.start, _num_common(before, pages) * kv.page_size)
        before = tuple(pages)
    return total


def _num_common(one: tuple[int, ...], other: list[int]) -> int:
    """Leading pages that are the same; those before a common page are common too."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
