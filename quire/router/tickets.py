"""Tickets: prompts computed by one kind of engine for another that decodes.

Before a request that generates goes to its upstream, its prompt is sent to an engine that prefills,
which answers with a ticket for the pages (`server/handover.py`). Whatever goes wrong there costs
the ticket alone: the request goes on without one, and its prompt is computed where it is decoded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import h11

from quire.obs.log import log_event
from quire.router.proxy import Asked, Placed, Proxy
from quire.router.upstream import Upstream
from quire.server.handover import MAX_TICKET, PREFILL, TICKET

GENERATES = ("/v1/chat/completions", "/v1/completions")
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
UNWANTED = ("stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "best_of", "echo")
OWN_HEADERS = (PREFILL.encode(), TICKET.encode())  # never a client's


class Tickets:
    def __init__(self, proxy: Proxy) -> None:
        """`proxy`: in front of engines that prefill."""
        self.proxy = proxy
        self.num_given = self.num_without = 0

    @property
    def engines(self) -> Sequence[Upstream]:
        return self.proxy.upstreams

    async def with_ticket(self, asked: Asked) -> Asked:
        """The request as the engine that decodes shall see it."""
        fields = asked.fields
        if fields is None or asked.target not in GENERATES or not _is_one_prompt(fields):
            return asked
        ticket = await self._ticket(asked, fields)
        if not ticket:
            self.num_without += 1
            return asked
        self.num_given += 1
        return replace(asked, headers=[*asked.headers, (TICKET.encode(), ticket)])

    async def _ticket(self, asked: Asked, fields: Mapping[str, Any]) -> bytes:
        """Empty: the prompt could not be computed, or left nothing to take."""
        wanted = {k: v for k, v in fields.items() if k not in UNWANTED} | ONE_TOKEN
        if asked.target == "/v1/completions":
            del wanted["max_completion_tokens"]
        headers = [*asked.headers, (PREFILL.encode(), b"1")]
        placed = await self.proxy.place(
            replace(asked, headers=headers, body=json.dumps(wanted).encode())
        )
        if not isinstance(placed, Placed):
            log_event("prefill_failed", severity=logging.WARNING, reason=str(placed))
            return b""
        try:
            await placed.answer.body()  # to its end, or it looks as if we had left
        except (OSError, h11.RemoteProtocolError) as error:
            log_event("prefill_failed", severity=logging.WARNING, reason=str(error))
            return b""
        finally:
            placed.answer.close()
            placed.place.leave()
        return next((v for n, v in placed.answer.headers if n == TICKET.encode()), b"")[:MAX_TICKET]


def _is_one_prompt(fields: Mapping[str, Any]) -> bool:
    """Lists of prompts are answered side by side; a ticket is for one."""
    prompt = fields.get("prompt")
    return not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)
