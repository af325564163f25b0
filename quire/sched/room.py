"""Room: where a request's pages are to be, and who competes for them.

Where each of several ranks keeps the pages of its own requests (`kv/homes.py`), a request competes
for pages with those of its home alone; everywhere else all requests have one home.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.kv.homes import choose_home
from quire.kv.manager import KVManager
from quire.request import Request, RequestId
from quire.sched.leftover import headroom
from quire.step import Work

Running = Mapping[RequestId, Request]


def find_home(request: Request, parent: Request | None, running: Running, kv: KVManager) -> bool:
    """A cheap look before hashing: False where there is no room. A sibling goes where its parent
    is, anybody else where it is best."""
    homes = list(range(kv.num_homes))
    if parent is not None and parent.id in kv.look():
        homes = [parent.home]
    fit = [home for home in homes if has_room(request, home, running, kv)]
    if fit:
        choose_home(request, kv, fit)
    else:
        request.home = max(homes, key=lambda home: num_free(kv, home))
    return bool(fit)


def has_room(request: Request, home: int, running: Running, kv: KVManager) -> bool:
    """Admitting must leave each running request room to grow.

    Without that headroom the newcomer would take the last pages and be preempted at once.
    """
    others = beside(home, running, kv)
    if not others:
        return True
    allocator = kv.allocator.of(home)
    need = kv.num_groups if kv.prefix_caching else kv.pages_for(request.num_known)
    growing = len(others) * kv.num_groups
    return allocator.num_available >= need + headroom(request, growing, allocator.num_pages)


def num_free(kv: KVManager, home: int) -> int:
    """Pages that a request of this home could be given."""
    return kv.allocator.of(home).num_available


def beside(home: int, running: Running, kv: KVManager) -> Running:
    """Who holds pages of this home."""
    if kv.num_homes == 1:
        return running
    return {id: request for id, request in running.items() if request.home == home}


def by_home(works: list[Work], running: Running, kv: KVManager) -> None:
    """Works of a home become neighbours, in the order they were in."""
    if kv.num_homes > 1:
        works.sort(key=lambda work: running[work.request_id].home)
