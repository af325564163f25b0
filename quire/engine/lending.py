"""ticket_for: an engine that prefills lends the pages of a prompt that it has just computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.kv.tier_index import NOTHING_RAISED
from quire.request import Request
from quire.step import TokenEvent

if TYPE_CHECKING:
    from quire.engine.build import Engine


def ticket_for(request: Request, event: TokenEvent, engine: Engine) -> str:
    """What another engine takes all full pages of a prompt with; empty: nobody asked for them, or
    there are none."""
    is_over = event.finish in ("stop", "length")
    if not request.kv_lease or not is_over or engine.tiers is None:
        return ""
    transfers = engine.core.scheduler.kv.transfers
    assert transfers is not None, "tiers that nobody connected"
    nodes, raiser = transfers.lend(request), engine.tiers.raiser
    raised = NOTHING_RAISED if raiser is None else raiser(transfers.pages_of(nodes))
    engine.core.save_now()
    ticket = engine.tiers.offer(nodes, raised)
    transfers.let_go(request)
    return ticket
