"""EngineLink: the API process's end of the socket to the engine. One event loop, no threads.

`open` hands a request to the engine and returns a `Tap`, from which its token events are read as
they come. When the engine dies every open tap ends with EngineDead at once, and the link keeps
trying to reach the next one. Nothing here knows of text or HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.engine import commands as msg
from quire.engine.commands import About, Beat, Command, Hello, Report
from quire.engine.wire import Codec, receive_async
from quire.errors import EngineDead
from quire.obs.log import log_event
from quire.request import Request, RequestId
from quire.server.problems import Refused
from quire.step import TokenEvent

RETRY_S = 0.05
SILENT_S = 10.0  # beats come every second
REPLY_S = 30.0
DEAD = "the engine stopped while it worked on this request; it is being restarted, try again"


class Tap:
    """Where the events of one request (and its n - 1 siblings) arrive."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.about: dict[RequestId, About] = {}
        self._failure: Exception | None = None
        self._ready = asyncio.Event()

    async def take(self) -> list[TokenEvent]:
        """All events since the last call; none when poked. Raises when no more can come."""
        if not self.events:
            if self._failure is None:
                self._ready.clear()
                await self._ready.wait()
            if self._failure is not None and not self.events:
                raise self._failure
        events, self.events = self.events, []
        return events

    def put(self, event: TokenEvent) -> None:
        self.events.append(event)
        self._ready.set()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._ready.set()

    def poke(self) -> None:
        """Let a waiting reader come up for air."""
        self._ready.set()


class EngineLink:
    def __init__(self, address: Path, stall_s: float) -> None:
        self.address, self.stall_s = address, stall_s
        self.hello: Hello | None = None
        self.beat: Beat | None = None
        self.num_restarts = -1  # connections after the first
        self.is_paused = False  # by an operator, through whichever API process
        self.on_hello: list[Callable[[Hello], None]] = []
        self.on_beat: list[Callable[[Beat], None]] = []
        self.on_picture: list[Callable[[dict[str, object]], None]] = []
        self.adapters: dict[str, msg.AdapterInfo] = {}  # that the engine has, by name
        self._awaited: dict[int, msg.AdapterInfo] = {}  # of those, what a new engine is loading
        self._heard = 0.0
        self._taps: dict[int, Tap] = {}
        self._replies: dict[int, asyncio.Future[msg.Reply]] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._commands: Codec[Command] = Codec(Command)
        self._reports: Codec[Report] = Codec(Report)

    # ------------------------------------------------------------ state

    @property
    def is_up(self) -> bool:
        return self._writer is not None and self.hello is not None

    def why_not_ready(self) -> str | None:
        """None when the engine is loaded and making progress."""
        if not self.is_up:
            return "the engine is loading" if self.num_restarts < 0 else "the engine is restarting"
        if time.monotonic() - self._heard > SILENT_S:
            return f"the engine has been silent for {time.monotonic() - self._heard:.0f} s"
        if self.beat is not None and self.beat.stalled_s > self.stall_s:
            return f"no step for {self.beat.stalled_s:.0f} s with work waiting"
        if self.is_paused:
            return "paused by an operator; POST /admin/resume lets it go on"
        return None

    @property
    def num_open(self) -> int:
        return len(self._taps)

    # ------------------------------------------------------------ requests

    def open(self, requests: Iterable[Request]) -> Tap:
        """Submit a leader with its children; raises EngineDead when there is no engine."""
        requests = list(requests)
        tap = Tap()
        self._send(msg.submit_of(requests[0]))
        for request in requests:
            self._taps[request.id] = tap
        return tap

    def close(self, ids: Iterable[int]) -> None:
        """Abort whatever of these still runs. Safe to call at any time."""
        open_ids = [id for id in ids if self._taps.pop(id, None) is not None]
        if open_ids and self._can_send:
            self._send(msg.Abort(open_ids))

    async def ask(self, make: Callable[[int], Command]) -> msg.Value:
        """Send a numbered command and wait for its reply. Raises Refused when that is a no."""
        number = next(self._numbers)
        future: asyncio.Future[msg.Reply] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            self._send(make(number))
            reply = await asyncio.wait_for(future, REPLY_S)
        except TimeoutError:
            raise EngineDead(f"the engine did not answer within {REPLY_S:.0f} s") from None
        finally:
            self._replies.pop(number, None)
        if reply.error is not None:
            raise Refused(reply.error)
        return reply.value

    async def set_paused(self, is_paused: bool) -> None:
        await self.ask(msg.Pause if is_paused else msg.Resume)
        self.is_paused = is_paused

    def watch(self, hz: float) -> None:
        if self._can_send:
            self._send(msg.Watch(hz))

    @property
    def _can_send(self) -> bool:
        return self._writer is not None and not self._writer.is_closing()

    def _send(self, command: Command) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineDead(self.why_not_ready() or DEAD)
        self._writer.write(self._commands.frame(command))

    # ------------------------------------------------------------ the connection

    async def run(self) -> None:
        """Connect, listen, and start over when the engine goes. Runs as long as the process."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(str(self.address))
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._listen(reader)
            except EngineDead as error:
                log_event("engine_link_broken", reason=str(error))
            finally:
                self._lose()
                await asyncio.sleep(RETRY_S)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while (body := await receive_async(reader)) is not None:
            self._heard = time.monotonic()
            report = self._reports.decode(body)
            if isinstance(report, msg.Events):
                self._spread(report)
            elif isinstance(report, Beat):
                self.beat, self.is_paused = report, report.is_paused
                for tell in self.on_beat:
                    tell(report)
            elif isinstance(report, msg.Snapshot):
                for show in self.on_picture:
                    show(report.picture)
            elif isinstance(report, msg.AdapterList):
                present = (*self._awaited.values(), *report.adapters)
                self.adapters = {one.name: one for one in present}
            elif isinstance(report, msg.Reply):
                self._awaited.pop(report.number, None)
                future = self._replies.get(report.number)
                if future is not None and not future.done():
                    future.set_result(report)
            else:
                self.hello = report
                self.num_restarts += 1
                self._bring_adapters(report.adapters)
                for greet in self.on_hello:
                    greet(report)

    def _bring_adapters(self, present: Iterable[msg.AdapterInfo]) -> None:
        """An engine that was restarted is told what its forerunner had, before any request."""
        had, self.adapters = self.adapters, {one.name: one for one in present}
        lost = [one for name, one in had.items() if name not in self.adapters]
        self._awaited = {next(self._numbers): one for one in lost}
        for number, one in self._awaited.items():
            self.adapters[one.name] = one
            self._send(msg.LoadAdapter(number, one.name, one.path))

    def _spread(self, report: msg.Events) -> None:
        taps = self._taps
        for about in report.about:
            if (tap := taps.get(about.id)) is not None:
                tap.about[RequestId(about.id)] = about
        for event in report.events:
            if (tap := taps.get(event.request_id)) is None:
                continue  # closed while this was on its way
            if event.finish is not None:
                del taps[event.request_id]
            tap.put(event)

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self.hello = self.beat = None
        self.is_paused = False  # the next engine is not, and this one forgets with us
        for tap in set(self._taps.values()):
            tap.fail(EngineDead(DEAD))
        self._taps.clear()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDead(DEAD))
