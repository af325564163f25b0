"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API around a chat plan.

What the request means is read in `messages_input.py`, what the answer looks like is
`messages_output.py`'s. Errors have Anthropic's body: the route table says so, and streams do it
themselves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from quire.outputs import StreamEvent
from quire.server import sse
from quire.server.fields import decode
from quire.server.generation import Generation
from quire.server.http import EventStream, HttpRequest, Reply
from quire.server.messages_input import CountTokensFields, MessagesFields, message_ask, prompt_ask
from quire.server.messages_output import PING, MessageShape, usage_of
from quire.server.outlet import Outlet
from quire.server.prompting import ChatPlan, prepare
from quire.server.segments import Segments
from quire.server.server import Server


async def messages(request: HttpRequest, server: Server) -> Reply | EventStream:
    fields = decode(request, MessagesFields)
    model = server.check_model(fields.model, request)
    plan = await prepare(server, request, message_ask(fields))
    answer = MessageAnswer(request, server, plan, MessageShape(model))
    if fields.stream:
        outlet = Outlet()
        return EventStream(answer.events(outlet), sse.named_failure, outlet=outlet)
    return Reply(sse.encode(await answer.whole()))


async def count_tokens(request: HttpRequest, server: Server) -> Reply:
    """How long the prompt of such a message would be; nothing is generated."""
    fields = decode(request, CountTokensFields)
    server.check_model(fields.model, request)
    prompt = (await prepare(server, request, prompt_ask(fields))).job.prompt
    assert isinstance(prompt, Mapping)
    return Reply(sse.encode({"input_tokens": len(prompt["prompt_token_ids"])}))


class MessageAnswer:
    """One answer in the making."""

    def __init__(
        self, request: HttpRequest, server: Server, plan: ChatPlan, shape: MessageShape
    ) -> None:
        self.request, self.server, self.plan, self.shape = request, server, plan, shape
        self.segments = Segments()

    async def whole(self) -> dict[str, Any]:
        async with Generation(self.server, self.request, self.plan.job) as generation:
            async for pieces in self.plan.choices(generation):
                for piece in pieces:
                    self.segments.take(piece)
            return self.shape.body(self.segments, usage_of(generation))

    async def events(self, outlet: Outlet) -> AsyncIterator[bytes]:
        """The beginning waits for a first sign of life, so that earlier errors have a status."""
        shape, has_begun = self.shape, False
        generation = Generation(self.server, self.request, self.plan.job)
        (reader,) = self.plan.readers()

        def show(events: Sequence[StreamEvent]) -> bytes:
            changes = (c for event in events for c in self.segments.take(reader.piece(event)))
            return b"".join(map(shape.change, changes))

        generation.show_through(outlet, show)
        async with generation:
            async for events in generation.pieces():
                made = b"" if has_begun else shape.beginning(usage_of(generation))
                has_begun = True
                if made := made + (show(events) if events else PING):
                    yield made
            yield shape.ending(self.segments, usage_of(generation))
