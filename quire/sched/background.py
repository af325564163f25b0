"""Background requests take what others leave: lines of a batch, of the last priority.

While anybody else waits or reads a prompt, background requests stand still: they keep their rows
and pages, and no step is longer for them. One that holds a row or pages somebody needs gives them
back at once and computes again later. Beside answers that are being written, they run along.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.request import BACKGROUND, Request
from quire.sched.queue import WaitingLine


def turns(
    running: Collection[Request], waiting: WaitingLine, waits_for_draws: bool = False
) -> list[Request]:
    """Who may be planned in the next step. `waits_for_draws`: nobody whose last token is still to
    be drawn, since the step would only wait for it."""
    found = [request for request in running if not (waits_for_draws and request.num_pending)]
    if not has_background(found):
        return found
    others = [request for request in found if not request.is_background]
    somebody_waits = len(waiting) > 0 and not waiting.peek().is_background
    if somebody_waits or any(request.num_to_feed > 1 for request in others):
        return others
    return found


def has_background(running: Collection[Request]) -> bool:
    """Asked in every step: looks at no request twice."""
    return BACKGROUND in [request.priority for request in running]


def gives_way(victim: Request, newcomer: Request) -> bool:
    """Whether a running request must leave for one that cannot be admitted otherwise."""
    return victim.is_background and not newcomer.is_background
