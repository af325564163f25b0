"""POST /v1/responses: OpenAI's Responses API around a chat plan, streamed or whole.

A response is stored unless it says otherwise, and a later one may go on from it (`turns.py`). What
the request means is read in `responses_input.py`, what the answer looks like is
`responses_output.py`'s; `stored_responses.py` gives back what is stored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from quire.kept.records import Record
from quire.outputs import StreamEvent
from quire.server import sse
from quire.server.batches import check_metadata
from quire.server.fields import decode
from quire.server.generation import Generation
from quire.server.http import EventStream, HttpRequest, Reply
from quire.server.outlet import Outlet
from quire.server.problems import Problem
from quire.server.prompting import ChatPlan, Piece, prepare
from quire.server.responses_input import ResponsesFields, chat_ask
from quire.server.responses_output import Made, ResponseShape, Said
from quire.server.segments import Segments, TokenLogprob
from quire.server.server import Server
from quire.server.settings import Limits
from quire.server.turns import Turn, open_turn
from quire.server.usage import chat_logprobs


async def responses(request: HttpRequest, server: Server) -> Reply | EventStream:
    fields = decode(request, ResponsesFields)
    answer = await _answer(request, server, fields)
    if fields.background:
        return Reply(sse.encode(await _put_off(answer, server.limits)))
    if fields.stream:
        outlet = Outlet()
        return EventStream(answer.events(outlet), answer.failure, outlet=outlet)
    return Reply(sse.encode(await answer.whole()))


async def _answer(
    request: HttpRequest, server: Server, fields: ResponsesFields, made: Made | None = None
) -> ResponseAnswer:
    model = server.check_model(fields.model, request)
    check_metadata(fields.metadata or {})
    turn = await open_turn(fields, request, server)
    plan = await prepare(server, request, chat_ask(fields, turn.history))
    if fields.truncation == "auto":
        request.warnings.append("truncation=auto is not done here: what is too long is refused")
    params = plan.params
    said = Said(model, params.temperature, params.top_p, turn.is_stored, turn.conversation_id)
    return ResponseAnswer(request, server, plan, ResponseShape(fields, said, made), turn)


async def _put_off(answer: ResponseAnswer, limits: Limits) -> dict[str, Any]:
    """Write down what is to be done; `background_responses.py` does it."""
    shelf = answer.turn.shelf
    assert shelf is not None, "a server that stores nothing refused this"
    body = answer.shape.body("queued", answer.segments, None)
    new = answer.turn.new_record(body, answer.request.body)
    await shelf.records.add_open(new, limits.max_background_responses_per_key)
    shelf.wake_responses.set()
    return body


async def make_response(request: HttpRequest, server: Server, record: Record) -> None:
    """Make a response that was put off. Raises as a handler does; nothing is written then."""
    fields = decode(request, ResponsesFields)
    made = Made(record.id.removeprefix("resp_"), record.created_at)
    answer = await _answer(request, server, fields, made)
    await answer.turn.finish(record, await answer.whole_unkept())


class ResponseAnswer:
    """One answer in the making."""

    def __init__(
        self,
        request: HttpRequest,
        server: Server,
        plan: ChatPlan,
        shape: ResponseShape,
        turn: Turn,
    ) -> None:
        self.request, self.server, self.plan = request, server, plan
        self.shape, self.turn = shape, turn
        self.segments = Segments()
        self._num_tokens = 0  # whose logprobs were read

    async def whole(self) -> dict[str, Any]:
        body = await self.whole_unkept()
        await self.turn.keep(body)
        return body

    async def whole_unkept(self) -> dict[str, Any]:
        async with Generation(self.server, self.request, self.plan.job) as generation:
            async for pieces in self.plan.choices(generation):
                for piece in pieces:
                    self.segments.take(piece, self._logprobs(piece, generation))
            return self.shape.finished(self.segments, usage(generation, self.segments))

    async def events(self, outlet: Outlet) -> AsyncIterator[bytes]:
        """The beginning waits for a first sign of life, so that earlier errors have a status."""
        shape, has_begun = self.shape, False
        generation = Generation(self.server, self.request, self.plan.job)
        (reader,) = self.plan.readers()

        def show(events: Sequence[StreamEvent]) -> bytes:
            made = []
            for piece in map(reader.piece, events):
                changes = self.segments.take(piece, self._logprobs(piece, generation))
                made += [shape.change(change) for change in changes]
            return b"".join(made)

        generation.show_through(outlet, show)
        async with generation:
            async for events in generation.pieces():
                made = b"" if has_begun else shape.beginning()
                has_begun = True
                if made := made + (show(events) if events else sse.PING):
                    yield made
            body = shape.finished(self.segments, usage(generation, self.segments))
        await self.turn.keep(body)
        yield shape.ending(body)

    def failure(self, problem: Problem) -> bytes:
        self.segments.cut()
        return self.shape.failure(problem, self.segments)

    def _logprobs(self, piece: Piece, generation: Generation) -> Sequence[TokenLogprob]:
        wanted = self.plan.params.logprobs
        if wanted is None or not piece.event.token_ids:
            return ()
        (answer,) = generation.conversation.answers.values()
        start = self._num_tokens  # the answer may already know of tokens in later pieces
        self._num_tokens += len(piece.event.token_ids)
        records = (answer.output.logprobs or [])[start : self._num_tokens]
        found: list[TokenLogprob] = chat_logprobs(records, wanted, self.server.tokenizer)["content"]
        return found


def usage(generation: Generation, segments: Segments) -> dict[str, Any]:
    num_prompt, num_output = generation.num_prompt, generation.num_output
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": generation.num_cached,
            "cache_write_tokens": 0,
        },
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": segments.num_reasoning},
        "total_tokens": num_prompt + num_output,
    }
