"""Prefiller: prompts are computed by one server, and answered by another that takes its pages.

A request that generates goes to a server of the role `prefill` first, as a request for one token.
What comes back is a ticket (`server/handover.py`), which travels on with the request to whoever the
router chooses to answer. No ticket, for whatever reason, means that the prompt is computed there.
Headers by which servers are told of this are never a client's to set.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import h11

from quire.obs.log import log_event
from quire.router.http_client import Headers, HttpClient, NotAnswered
from quire.router.proxy import Asked
from quire.router.settings import UpstreamAddress
from quire.server.handover import MAX_TICKET, PREFILL, TICKET

GENERATES = ("/v1/chat/completions", "/v1/completions")
ONE_TOKEN = {"max_tokens": 1, "n": 1, "stream": False}
UNWANTED = (
    *("max_completion_tokens", "min_tokens", "stream_options", "best_of", "echo"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids"),
)
OWN = (PREFILL.encode(), TICKET.encode())


class Prefiller:
    def __init__(
        self, addresses: Sequence[UpstreamAddress], connect_s: float, head_s: float
    ) -> None:
        self._clients = [HttpClient(address, connect_s) for address in addresses]
        self._num_open = [0] * len(self._clients)
        self._head_s = head_s
        self.num_tickets = self.num_without = 0

    async def with_ticket(self, asked: Asked) -> Asked:
        """The same request, with a ticket where there could be one."""
        headers = [(name, value) for name, value in asked.headers if name not in OWN]
        one_token = _one_token(asked)
        if not self._clients or one_token is None:
            return replace(asked, headers=headers)
        ticket = await self._ticket(asked, headers, one_token)
        self.num_tickets += bool(ticket)
        self.num_without += not ticket
        if ticket:
            headers.append((TICKET.encode(), ticket))
        return replace(asked, headers=headers)

    async def _ticket(self, asked: Asked, headers: Headers, body: bytes) -> bytes:
        index = self._num_open.index(min(self._num_open))
        client = self._clients[index]
        self._num_open[index] += 1
        sent = [*headers, (PREFILL.encode(), b"1")]
        try:
            async with asyncio.timeout(self._head_s):
                answer = await client.send(asked.method, asked.target, sent, body)
                try:
                    await answer.body()
                finally:
                    answer.close()
            return dict(answer.headers).get(TICKET.encode(), b"")[:MAX_TICKET]
        except (NotAnswered, OSError, TimeoutError, h11.RemoteProtocolError) as error:
            log_event("prefill_failed", severity=logging.WARNING, reason=str(error))
            return b""
        finally:
            self._num_open[index] -= 1

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _one_token(asked: Asked) -> bytes | None:
    """The request for one token that has the same prompt; None: it has none, or several."""
    if asked.method != "POST" or asked.more is not None:
        return None
    if asked.target.partition("?")[0] not in GENERATES:
        return None
    try:
        fields: Any = json.loads(asked.body)
    except (ValueError, RecursionError):
        return None  # whoever gets it will say so
    if not isinstance(fields, dict):
        return None
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        return None
    kept = {name: value for name, value in fields.items() if name not in UNWANTED}
    return json.dumps(kept | ONE_TOKEN).encode()
