"""Headers by which a router hands a request from an engine that prefills to one that decodes.

    x-quire-prefill: 1        compute the prompt; the answer's x-quire-kv-ticket says where it is
    x-quire-kv-ticket: TEXT   take the prompt's pages from there

They are read by engines of the role that they are for, and ignored by all others. A ticket opens
nothing by itself: the engine pulls from peers it was started with, and checks what it gets.
"""

from __future__ import annotations

from quire.request import Request
from quire.server.http import HttpRequest

PREFILL, TICKET = "x-quire-prefill", "x-quire-kv-ticket"
TICKET_HEADER = TICKET.encode()
MAX_TICKET = 512


def read_role(role: str, http: HttpRequest, request: Request) -> None:
    """Set what the headers ask for on a request that is about to be submitted."""
    if role == "prefill" and http.headers.get(PREFILL) == "1":
        request.kv_lease = True
        request.max_tokens = 1
    elif role == "decode":
        request.kv_source = http.headers.get(TICKET, "")[:MAX_TICKET]
