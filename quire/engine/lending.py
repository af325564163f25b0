"""ticket_for: an engine that prefills lends the pages of a prompt that it has just computed."""

from __future__ import annotations

from quire.engine.core import EngineCore
from quire.request import Request
from quire.tiers.tiers import Tiers


def ticket_for(request: Request, core: EngineCore, tiers: Tiers) -> str:
    """A ticket for all full pages of the prompt; empty: there is nothing to lend."""
    transfers = core.scheduler.kv.transfers
    if transfers is None:
        return ""
    nodes = transfers.lend(request)
    core.save_now()
    ticket = tiers.offer(nodes)
    transfers.let_go(request)
    return ticket
