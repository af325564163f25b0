"""Homes: the pages of several ranks, each of which keeps those of its own requests.

A request has one home at a time, `Request.home`, and every page it holds is that rank's. Pages are
numbered through: 1 to n are the first rank's, n + 1 to 2 n the second one's. So one set of records
and one prefix tree serve all ranks; the roots of the tree differ by home, and a prefix is found
where its pages are. `runner/home_pages.py` turns the numbers into places of a rank's own pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.kv.allocator import SCRATCH_PAGE, OnEvict, PageAllocator, PageRecords

if TYPE_CHECKING:
    from quire.kv.manager import KVManager
    from quire.request import Request


# Held pages that weigh as much as one to compute. With more, requests that begin alike gather on
# one rank; with less, a burst of them computes what they have in common once on every rank.
COMPUTED = 4


class HomeAllocators:
    """What `PageAllocator` is for one rank, and the sums over all."""

    def __init__(self, num_pages: int, on_evict: OnEvict, num_homes: int) -> None:
        """`num_pages`: of each rank, with its scratch page."""
        records, each = PageRecords((num_pages - 1) * num_homes + 1), num_pages - 1
        self.refs, self.node_of, self._each = records.refs, records.node_of, each
        firsts = [SCRATCH_PAGE + 1 + home * each for home in range(num_homes)]
        self._homes = [PageAllocator(num_pages, on_evict, records, first) for first in firsts]

    def of(self, home: int) -> PageAllocator:
        return self._homes[home]

    @property
    def num_pages(self) -> int:
        return self._each * len(self._homes)

    @property
    def num_available(self) -> int:
        return sum(home.num_available for home in self._homes)

    @property
    def num_empty(self) -> int:
        return sum(home.num_empty for home in self._homes)

    @property
    def num_cached(self) -> int:
        return sum(home.num_cached for home in self._homes)

    @property
    def num_live(self) -> int:
        return sum(home.num_live for home in self._homes)

    @property
    def num_evicted(self) -> int:
        return sum(home.num_evicted for home in self._homes)

    def home_of(self, page: int) -> int:
        return (page - SCRATCH_PAGE - 1) // self._each

    def is_cached(self, page: int) -> bool:
        return page != SCRATCH_PAGE and self.of(self.home_of(page)).is_cached(page)

    def flush(self) -> int:
        return sum(home.flush() for home in self._homes)


def allocator_of(
    num_pages: int, on_evict: OnEvict, num_homes: int
) -> PageAllocator | HomeAllocators:
    if num_homes == 1:
        return PageAllocator(num_pages, on_evict)
    return HomeAllocators(num_pages, on_evict, num_homes)


def choose_home(request: Request, kv: KVManager, homes: Sequence[int]) -> None:
    """Of these, the one where it costs least: pages held there, which all its steps attend, and
    pages of the request that are not there and must be computed. Ties go to the longest prefix."""

    def cost(home: int) -> tuple[int, int]:
        request.home = home
        num_found = len(kv.find(request)) * kv.num_groups
        missing = max(0, kv.pages_for(request.num_known) - num_found)
        return kv.allocator.of(home).num_live + COMPUTED * missing, -num_found

    request.home = homes[0] if len(homes) == 1 else min(homes, key=cost)
