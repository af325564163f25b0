"""EngineLink: the API process's end of the socket to the engine. One event loop, no threads.

`open` hands a request to the engine and returns a `Tap`, from which its token events are read as
they come. When the engine dies every open tap ends with EngineDead at once, and the link keeps
trying to reach the next one. Nothing here knows of text or HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from quire.engine import commands as msg
from quire.engine.commands import About, Beat, Command, Hello, Report
from quire.engine.wire import Codec, Frames
from quire.errors import EngineDead
from quire.obs.log import log_event
from quire.request import Request, RequestId
from quire.server.problems import Failed, Refused
from quire.step import TokenEvent

RETRY_S = 0.05
READ_BYTES = 1 << 20  # at once: steps that came meanwhile are read together
SILENT_S = 10.0  # beats come every second
REPLY_S = 30.0
DEAD = "the engine stopped while it worked on this request; it is being restarted, try again"


class Tap:
    """Where the events of one request (and its n - 1 siblings) arrive.

    A reader that waits may leave word what to do with news while it sleeps (`pass_on`). Nothing is
    passed on while it is at work, so what it does and what is done for it never overlap.
    """

    def __init__(self, is_background: bool = False) -> None:
        self.is_background = is_background  # a line of a batch: nobody waits for it
        self.events: list[TokenEvent] = []
        self.about: dict[RequestId, About] = {}
        self.pass_on: Callable[[], bool] | None = None  # False: the reader has to see to it
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[TokenEvent]:
        """All events since the last call; none when poked. Raises when no more can come."""
        if not self.events:
            if self._failure is None:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            if self._failure is not None and not self.events:
                raise self._failure
        events, self.events = self.events, []
        return events

    def put(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.tell()

    def tell(self) -> None:
        """There are new events: once for all of a step, or of several when they came together."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # it is at work, and finds them when it comes back
        if not self.events:
            return  # it has found them already: word comes a turn of the loop after the events
        may_sleep_on = False
        try:
            if self.pass_on is not None and self._failure is None:
                self._failure = Failed("the server failed on this request")  # if it raises
                may_sleep_on = self.pass_on()
                self._failure = None
        finally:
            if not may_sleep_on:
                waiter.set_result(None)

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self.poke()

    def poke(self) -> None:
        """Let a waiting reader come up for air."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineLink:
    def __init__(self, address: Path, stall_s: float) -> None:
        self.address, self.stall_s = address, stall_s
        self.hello: Hello | None = None
        self.beat: Beat | None = None
        self.num_restarts = -1  # connections after the first
        self.is_paused = False  # by an operator, through whichever API process
        self.is_parked = False  # without its GPU's memory: requests wait until it is told to return
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

    @property
    def can_step(self) -> bool:
        """Whether the model is in memory."""
        return self.is_up and not self.is_parked

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

    @property
    def has_users(self) -> bool:
        """Whether requests are open that somebody waits for."""
        return any(not tap.is_background for tap in self._taps.values())

    @property
    def has_background(self) -> bool:
        return any(tap.is_background for tap in self._taps.values())

    # ------------------------------------------------------------ requests

    def open(self, requests: Iterable[Request], is_background: bool = False) -> Tap:
        """Submit a leader with its children; raises EngineDead when there is no engine. Whether
        somebody waits for them is not told by their priority, which clients may choose."""
        requests = list(requests)
        tap = Tap(is_background)
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
                address = str(self.address)
                reader, self._writer = await asyncio.open_unix_connection(address, limit=READ_BYTES)
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
        """Whoever has news of several steps is told once."""
        frames, loop = Frames(), asyncio.get_running_loop()
        while data := await _read(reader):
            self._heard = time.monotonic()
            told: dict[int, Tap] = {}
            try:
                for body in frames.feed(data):
                    report = self._reports.decode(body)
                    if isinstance(report, msg.Events):
                        self._spread(report, told)
                    else:
                        self._take(report)
            finally:
                loop.call_soon(_tell, iter(told.values()))

    def _take(self, report: msg.ReportOfEngine) -> None:
        """Anything but news of requests."""
        if isinstance(report, Beat):
            self.beat, self.is_paused, self.is_parked = report, report.is_paused, report.is_parked
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
            self.hello, self.is_parked = report, report.is_parked
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

    def _spread(self, report: msg.Events, told: dict[int, Tap]) -> None:
        """Enter the events, and who is to be told of them."""
        taps = self._taps
        for about in report.about:
            if (tap := taps.get(about.id)) is not None:
                tap.about[RequestId(about.id)] = about
        for event in report.events:
            if (tap := taps.get(event.request_id)) is None:
                continue  # closed while this was on its way
            if event.finish is not None:
                del taps[event.request_id]
            tap.events.append(event)
            told[id(tap)] = tap

    def _lose(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self.hello = self.beat = None
        self.is_paused = self.is_parked = False  # the next engine is not; this one forgets with us
        for tap in set(self._taps.values()):
            tap.fail(EngineDead(DEAD))
        self._taps.clear()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDead(DEAD))


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Nothing when the other side is gone."""
    try:
        return await reader.read(READ_BYTES)
    except ConnectionError:
        return b""


def _tell(taps: Iterator[Tap]) -> None:
    """An error of one is the loop's to report; the others are told all the same."""
    is_done = False
    try:
        for tap in taps:
            tap.tell()
        is_done = True
    finally:
        if not is_done:
            asyncio.get_running_loop().call_soon(_tell, taps)
