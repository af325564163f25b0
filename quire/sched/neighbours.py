"""side_by_side: decodes whose contexts begin with the same pages become neighbours in their step.

Attention then reads those pages once for all of them (`kernels/paged_shared.py`). It is worth it
for long prefixes and many requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from quire.kv.manager import KVManager
from quire.request import RequestId
from quire.step import Work

WORTH_SHARING = 512  # leading tokens in common from which decodes attend them together
WORTH_SHARING_AMONG = 8  # decodes behind common prefixes, to attend those prefixes together


class Ordered(NamedTuple):
    works: list[Work]
    shares_prefix: bool


def in_order(works: Iterable[Work], kv: KVManager, has_new: bool, has_late: bool) -> Ordered:
    """How the works of a step lie: somebody was admitted, or reads a prompt, or all decode."""
    ordered = list(works)
    shares_prefix = not has_new and side_by_side(ordered, kv)
    if not has_new and not has_late and not shares_prefix:
        # Longest contexts first: a step of decodes would otherwise end up waiting for them.
        ordered.sort(key=attrgetter("start"), reverse=True)
    return Ordered(ordered, shares_prefix)


def side_by_side(works: list[Work], kv: KVManager) -> bool:
    """Whether many decodes share their first pages; if so, sharers become neighbours."""
    if len(works) < WORTH_SHARING_AMONG or any(work.num_tokens > 1 for work in works):
        return False
    pages = common_pages(kv, [work.request_id for work in works])
    if len(pages) - pages.count(None) < WORTH_SHARING_AMONG:
        return False
    page_of = dict(zip([work.row for work in works], pages, strict=True))
    works.sort(key=lambda work: page_of[work.row] or 0)
    return True


def common_pages(kv: KVManager, request_ids: Iterable[RequestId]) -> list[int | None]:
    """For each request the last page of its first WORTH_SHARING tokens, if others hold it too.

    Looks at the layers that see everything. All pages before a common page are common too."""
    if kv.windows[0] is not None:  # no layer sees everything
        return [None for _ in request_ids]
    held, refs = kv.look(), kv.allocator.refs
    column = max(WORTH_SHARING // kv.page_size, 1) - 1
    found: list[int | None] = []
    for request_id in request_ids:
        pages = held[request_id].tables[0]
        is_common = len(pages) > column and refs[pages[column]] > 1
        found.append(pages[column] if is_common else None)
    return found
