"""Background requests take what others leave: lines of a batch, of the last priority.

While anybody else waits or reads a prompt, background requests stand still: they keep their rows
and pages, and no step is longer for them. One that holds a row or pages somebody needs gives them
back at once and computes again later. `leftover.py` says how many run along beside answers that are
being written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from quire.request import BACKGROUND, Request, RequestId
from quire.sched.stats import Counts
from quire.step import TokenEvent, Work


def has_background(running: Collection[Request]) -> bool:
    """Asked in every step: looks at no request twice."""
    return BACKGROUND in [request.priority for request in running]


def gives_way(victim: Request, newcomer: Request) -> bool:
    """Whether a running request must leave for one that cannot be admitted otherwise."""
    return victim.is_background and not newcomer.is_background


def is_all_background(works: Sequence[Work], running: Mapping[RequestId, Request]) -> bool:
    """Whether nobody waits for a step. Drafts are left in peace: whoever made them remembers."""
    return bool(works) and all(
        running[work.request_id].is_background and not work.num_drafts for work in works
    )


def take_back(
    works: Sequence[Work], running: Mapping[RequestId, Request], counts: Counts
) -> list[TokenEvent]:
    """A step was given up: its requests are where they were, and nothing is new."""
    for work in works:
        if (request := running.get(work.request_id)) is not None:
            request.num_inflight -= work.num_tokens
            request.num_pending -= work.sample
            counts.recomputed += work.num_tokens
    return []
