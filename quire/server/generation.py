"""Generation: one accepted request, from admission to its last token, as pieces of text.

Used as an async context manager, so that leaving it in any way (done, failed, client gone) aborts
what still runs in the engine and gives the room back. Several of one HTTP request share a ticket
(see `merge.py`). Text is made here from token events by the same `Conversation` the offline API
uses.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from quire.engine.commands import ADAPTER_GONE, QUEUE_TIMEOUT
from quire.engine.output import Conversation
from quire.errors import BadRequest, EngineDead, NotSupported
from quire.grammar.spec import NOTHING_LEFT
from quire.obs.report import FinishReport
from quire.obs.trace import finish_attributes, request_attributes
from quire.outputs import RequestOutput, StreamEvent
from quire.params import SamplingParams
from quire.server.admission import Admission, Size, Ticket
from quire.server.handover import read_role
from quire.server.outlet import Outlet, Way
from quire.server.problems import Expired, Failed, Problem
from quire.step import TokenEvent

if TYPE_CHECKING:
    from quire.engine.intake import Prompt
    from quire.server.answer_cache import Looked
    from quire.server.cache_wish import CacheWish
    from quire.server.http import HttpRequest
    from quire.server.link import Tap
    from quire.server.server import Server


class Job(NamedTuple):
    """What to generate. `prompt` holds token ids already."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    timeout_s: float | None = None
    cache: CacheWish | None = None  # None: the answer is made anew and not kept
    hint: tuple[int, ...] = ()  # tokens that the answer may be much like


Show = Callable[[Sequence[StreamEvent]], bytes]  # pieces as the client gets them


class Generation:
    def __init__(self, server: Server, request: HttpRequest, job: Job) -> None:
        self.server, self.http, self.job = server, request, job
        self.looked: Looked | None = None  # what the cache of answers found out
        self.ticket: Ticket | None = None  # of the request this is a part of; None: it is alone
        self.timeout_s = math.inf  # a batch has a window of its own
        if not request.is_background:
            longest = server.limits.request_timeout_s
            self.timeout_s = min(job.timeout_s or longest, longest)
        if server.verdict is not None and job.params.pooling is None:
            raise NotSupported(
                f"{server.model_names[0]} classifies and cannot generate; use /classify, /pooling,"
                " /score or /v1/embeddings"
            )
        self.gate = request.route.gate if request.route is not None else None
        params = job.params if self.gate is None else self.gate.watched(job.params)
        text, self.requests = server.intake.requests(job.prompt, params, job.priority)
        self.requests[0].hint = job.hint
        for one in self.requests:
            one.adapter_name = request.adapter
        if request.caller is not None:
            for one in self.requests:
                one.tenant, one.weight = request.caller.salt, request.caller.weight
        read_role(server.settings.engine.kv_role, request, self.requests[0])
        self.conversation = Conversation(request.id, text, self.requests, server.tokenizer)
        self.inbox: deque[StreamEvent] = deque()
        self.conversation.inbox = self.inbox
        self.pooled: list[float] | None = None
        self._last_token: dict[int, float] = {}
        self._outlet: Way = Outlet()
        self._show: Show | None = None
        self._is_gathered = False
        self._unsent: Awaitable[None] | None = None  # the rest of a write that was passed on
        self._was_stopped = False  # by a stop string, one of the answers at least
        self._was_shown = False  # by `_pass_on`, although the reader was woken
        self._span = server.tracer.start(
            "llm_request",
            request.headers.get("traceparent"),
            request_attributes(server.model_names[0], request.id, params.n, params.max_tokens),
        )

    @property
    def admission(self) -> Admission:
        server = self.server
        return server.background if self.http.is_background else server.admission

    @property
    def num_prompt(self) -> int:
        return self.requests[0].num_prompt

    @property
    def num_output(self) -> int:
        return sum(len(a.output.token_ids) for a in self.conversation.answers.values())

    @property
    def num_predicted(self) -> tuple[int, int]:
        """Drafts that became output, and those that did not."""
        answers = self.conversation.answers.values()
        accepted = sum(answer.num_accepted for answer in answers)
        return accepted, sum(answer.num_drafted for answer in answers) - accepted

    @property
    def num_cached(self) -> int:
        return self.requests[0].num_cached

    # ------------------------------------------------------------ lifetime

    @property
    def size(self) -> Size:
        leader, n = self.requests[0], len(self.requests)
        return Size(n, n * (leader.num_prompt + leader.max_tokens))

    def admit(self) -> Ticket:
        """A place for the request that this is the first part of; raises when there is none."""
        server, caller = self.server, self.http.caller
        if server.is_draining:
            raise Problem(503, "the server is shutting down", code="draining", retry_after_s=5)
        return self.admission.enter(caller.salt if caller else "", self.size)

    async def join(self, ticket: Ticket) -> None:
        """Wait for room behind the other parts of a request."""
        await self.admission.enter_part(ticket, self.size)
        self.ticket = ticket

    async def __aenter__(self) -> Generation:
        server, leader = self.server, self.requests[0]
        self._is_alone = self.ticket is None
        self.ticket = self.ticket or self.admit()
        self.begun = self.heard = time.monotonic()
        self.deadline = self.http.deadline = self.ticket.begun + self.timeout_s
        leader.timing.arrival = self.begun  # a part may have waited for others of its request
        try:
            self.tap = await self._open()
        except BaseException:
            self._give_back(self.ticket)
            raise
        server.watchman.generations.add(self)
        server.metrics.accepted(
            n=len(self.requests),
            max_tokens=leader.params.max_tokens,
            prompt_tokens=leader.num_prompt,
        )
        if self.gate is not None:
            try:
                await self.gate.hold(self)
            except BaseException as error:
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
        return self

    async def _open(self) -> Tap:
        """The engine, or an answer that was given before."""
        answers = self.server.answers
        found = await answers.look(self) if answers is not None else None
        return found or self.server.link.open(self.requests, self.http.is_background)

    def _give_back(self, ticket: Ticket) -> None:
        if self._is_alone:
            self.admission.leave(ticket)
        else:
            self.admission.leave_part(ticket, self.size)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        server = self.server
        server.watchman.generations.discard(self)
        server.link.close(request.id for request in self.requests)
        assert self.ticket is not None
        self._give_back(self.ticket)
        reason = self._reason() if kind is None else "error" if _is_ours(error) else "abort"
        report = self._finish_report(reason)
        server.metrics.finished(report)
        if self.http.route is not None:
            used = report.prompt_tokens + report.output_tokens
            self.http.route.spend(server, self.http, used)
        if server.answers is not None and reason in ("stop", "length"):
            server.answers.learn(self)
        self.http.notes.update(
            prompt_tokens=report.prompt_tokens, output_tokens=report.output_tokens
        )
        self.http.notes.setdefault("finish_reason", reason)
        first = self.requests[0].timing.first_token
        self._span.set(finish_attributes(report, None if first is None else first - self.begun))
        self._span.end(None if kind is None else kind.__name__)

    def _reason(self) -> str:
        reasons = [a.output.finish_reason for a in self.conversation.answers.values()]
        return next((reason for reason in reasons if reason), "abort")

    def _finish_report(self, reason: str) -> FinishReport:
        timing, now = self.requests[0].timing, time.monotonic()
        first = timing.first_token
        queue = None if timing.scheduled is None else timing.scheduled - timing.arrival
        prefill = first - timing.scheduled if first and timing.scheduled else None
        last = max(self._last_token.values(), default=None)
        decode = last - first if first and last else None
        return FinishReport(
            reason=reason,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_cached,
            output_tokens=self.num_output,
            e2e_s=now - self.begun,
            queue_s=queue,
            prefill_s=prefill,
            decode_s=decode,
            num_preempted=sum(r.num_preempted for r in self.requests),
            is_background=self.http.is_background,
        )

    # ------------------------------------------------------------ tokens

    def show_through(self, outlet: Way, show: Show) -> None:
        """While the reader of `pieces` waits for more, write what `show` makes of them to the
        client without waking it."""
        self._outlet, self._show = outlet, show

    def gather(self) -> None:
        """Nobody sees an answer before it is whole: the reader of `pieces` sleeps until then."""
        self._is_gathered = True

    def _pass_on(self) -> bool:
        """Whether the reader may sleep on. Ends are for it, and so is a client that is behind."""
        events, outlet, show = self.tap.events, self._outlet, self._show
        if not self._is_gathered and (show is None or not outlet.is_open):
            return False
        for event in events:
            if event.finish is not None:
                return False
        self.tap.events = []
        if show is None:
            self._enter(events)
            return not (self._was_stopped and self.conversation.finished)
        if made := show(self._fold(events)):
            self._unsent = outlet.write(made)
        is_over = self._was_stopped and self.conversation.finished
        self._was_shown = is_over or self._unsent is not None
        return not self._was_shown

    async def pieces(self) -> AsyncIterator[Sequence[StreamEvent]]:
        """What each step added; an empty list now and then when there is long nothing."""
        self.tap.pass_on = self._pass_on
        while not self.conversation.finished:
            events = await self.tap.take()
            if self._unsent is not None:
                unsent, self._unsent = self._unsent, None
                await unsent
            shown = self._fold(events)
            if shown or not (events or self._was_shown):
                yield shown
            self._was_shown = False

    def _fold(self, events: Sequence[TokenEvent]) -> list[StreamEvent]:
        """Enter events; what they add to the text, and what was gathered before."""
        self._enter(events)
        shown = list(self.inbox)
        self.inbox.clear()
        return shown

    def _enter(self, events: Sequence[TokenEvent]) -> None:
        self._settle(events)
        for event in events:
            if self.conversation.take(event):
                self._was_stopped = True
                self.server.link.close([event.request_id])

    async def whole(self) -> RequestOutput:
        self.gather()
        async for _ in self.pieces():
            pass
        return self.conversation.result()

    def _settle(self, events: Sequence[TokenEvent]) -> None:
        """Bookkeeping around the text: clocks, metrics, errors."""
        now = self.heard = time.monotonic()
        metrics, last = self.server.metrics, self._last_token
        for event in events:
            if event.tokens:
                before = last.get(event.request_id)
                last[event.request_id] = now
                is_timed = not self.http.is_background
                if before is None and len(last) == 1 and is_timed:
                    metrics.first_token(now - self.begun)
                gap = now - before if before is not None and is_timed else None
                metrics.tokens(len(event.tokens), gap)
                if before is None:
                    self._take_report(event)
            if event.pooled:
                self.pooled = list(event.pooled)
            if event.finish is not None:
                self._take_report(event)
                if event.finish == "error":
                    raise self._error(event)

    def _take_report(self, event: TokenEvent) -> None:
        about = self.tap.about.get(event.request_id)
        if about is None:
            return
        for request in self.requests:
            if request.id == event.request_id:
                request.num_cached, request.cache_note = about.num_cached, about.cache_note
                request.num_preempted = about.num_preempted
                timing = request.timing
                timing.scheduled, timing.first_token = about.scheduled, about.first_token
                timing.last_token = about.last_token
                self.http.kv_ticket = about.kv_ticket or self.http.kv_ticket

    def _error(self, event: TokenEvent) -> Exception:
        if event.error == QUEUE_TIMEOUT:
            seconds = self.server.limits.queue_timeout_s
            return Expired(f"no room within {seconds:g} s; try again later", is_queue=True)
        if event.error == ADAPTER_GONE:
            text = f"the adapter {self.http.adapter!r} was unloaded; /v1/load_lora_adapter loads it"
            return Problem(404, text, param="model", code="model_not_found")
        if event.error == NOTHING_LEFT:
            return BadRequest(f"{event.error}; loosen one of them", param="structured_outputs")
        return Failed(event.error or "the engine could not go on with this request")

    def timings(self) -> dict[str, float]:
        """Milliseconds by phase, for clients that want to see them."""
        report = self._finish_report("")
        first = self.requests[0].timing.first_token
        decode = report.decode_s or 0.0
        rate = (report.output_tokens - 1) / decode if decode > 0 else 0.0
        return {
            "queue_ms": round((report.queue_s or 0.0) * 1e3, 3),
            "ttft_ms": round((first - self.begun) * 1e3, 3) if first else 0.0,
            "prefill_ms": round((report.prefill_s or 0.0) * 1e3, 3),
            "decode_ms": round(decode * 1e3, 3),
            "tokens_per_s": round(rate, 3),
        }


def _is_ours(error: BaseException | None) -> bool:
    """Whether the engine ended it, and not the client."""
    return isinstance(error, (Failed, EngineDead))
