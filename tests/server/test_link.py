"""The API process's end of the engine socket, against an engine played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.engine import commands as msg
from quire.engine.wire import Codec, receive_async
from quire.errors import EngineDead
from quire.params import SamplingParams
from quire.request import Request
from quire.server import link as link_module
from quire.server.link import EngineLink, Tap
from quire.server.problems import Failed, Refused
from quire.step import TokenEvent

HELLO = msg.Hello(1, "0", "Fake", 64, 8, 64, 7, 8, [1], [], 0.5)
BEAT = msg.Beat({}, has_work=True, is_paused=False, stalled_s=0.0)


class PlayedEngine:
    """Listens where the link looks; says what the test wants said."""

    def __init__(self, address: Path) -> None:
        self.address = address
        self.heard: list[msg.Command] = []
        self._reports: Codec[msg.Report] = Codec(msg.Report)  # type: ignore[arg-type]
        self._commands: Codec[msg.Command] = Codec(msg.Command)  # type: ignore[arg-type]
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self.address.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.address))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.say(HELLO)
        while (body := await receive_async(reader)) is not None:
            self.heard.append(self._commands.decode(body))

    def say(self, report: msg.Report) -> None:
        self.write(self.frame(report))

    def frame(self, report: msg.Report) -> bytes:
        return self._reports.frame(report)

    def write(self, data: bytes) -> None:
        self._writers[-1].write(data)

    async def die(self) -> None:
        assert self._server is not None
        self._server.close()
        self.address.unlink(missing_ok=True)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.005)


def with_engine(folder: Path, work: Callable[[EngineLink, PlayedEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine, link = PlayedEngine(folder / "e.sock"), EngineLink(folder / "e.sock", stall_s=3.0)
        await engine.start()
        task = asyncio.ensure_future(link.run())
        try:
            await until(lambda: link.is_up)
            await asyncio.wait_for(work(link, engine), 20)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await engine.die()

    asyncio.run(run())


def request(id: int) -> Request:
    return Request.new(id, [1, 2], SamplingParams(max_tokens=4))


def test_tokens_reach_their_own_tap(tmp_path: Path) -> None:
    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        one, two = link.open([request(1)]), link.open([request(2)])
        engine.say(msg.Events([TokenEvent(2, [5]), TokenEvent(1, [6]), TokenEvent(77, [1])]))
        assert [e.tokens for e in await one.take()] == [[6]]
        assert [e.tokens for e in await two.take()] == [[5]]
        engine.say(msg.Events([TokenEvent(1, [], "stop")]))
        await one.take()
        assert link.num_open == 1

    with_engine(tmp_path, work)


def test_a_tap_is_told_once_of_steps_that_came_together(tmp_path: Path) -> None:
    """Red when a stream that is behind is woken, or writes, once for each step."""

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        taps = [link.open([request(1), request(2)]), link.open([request(3)])]
        seen: list[list[list[int]]] = [[], []]
        readers = [asyncio.ensure_future(tap.take()) for tap in taps]
        for index, tap in enumerate(taps):

            def pass_on(index: int = index, tap: Tap = tap) -> bool:
                seen[index].append([event.tokens[0] for event in tap.events])
                tap.events = []
                return True

            tap.pass_on = pass_on
        await asyncio.sleep(0)  # both wait
        steps = [
            msg.Events([TokenEvent(id, [10 * step + id]) for id in (1, 2, 3)]) for step in (1, 2)
        ]
        engine.write(b"".join(engine.frame(step) for step in steps))
        await until(lambda: all(seen))
        assert seen == [[[11, 12, 21, 22]], [[13, 23]]]
        assert not any(reader.done() for reader in readers), "they sleep on"
        taps[0].poke()
        assert await readers[0] == []
        readers[1].cancel()

    with_engine(tmp_path, work)


def test_one_that_fails_does_not_keep_news_from_the_others(tmp_path: Path) -> None:
    """Red when a bug in what one stream does with its tokens costs another its own."""

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        reported: list[str] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: reported.append(repr(context.get("exception")))
        )
        bad, good = link.open([request(1)]), link.open([request(2)])
        readers = [asyncio.ensure_future(tap.take()) for tap in (bad, good)]

        def raises() -> bool:
            bad.events = []
            raise LookupError("a bug")

        bad.pass_on = raises
        await asyncio.sleep(0)
        engine.say(msg.Events([TokenEvent(1, [5]), TokenEvent(2, [6])]))
        assert [list(event.tokens) for event in await readers[1]] == [[6]]
        with pytest.raises(Failed):
            await readers[0]
        assert reported == ["LookupError('a bug')"] and link.is_up

    with_engine(tmp_path, work)


def test_nothing_is_passed_on_while_the_reader_is_at_work() -> None:
    """Red when two write to one client at once."""

    async def work() -> None:
        tap = Tap()
        tap.pass_on = lambda: pytest.fail("nobody waits")
        tap.put(TokenEvent(1, [5]))
        assert [e.tokens for e in await tap.take()] == [[5]]
        tap.put(TokenEvent(1, [6]))
        assert [e.tokens for e in await tap.take()] == [[6]]

    asyncio.run(work())


def test_word_of_events_that_were_taken_wakes_nobody() -> None:
    """Red when a reader that found its events before it was told of them is woken for nothing, and
    its client gets a sign of life between two tokens."""

    async def work() -> None:
        tap = Tap()
        tap.events.append(TokenEvent(1, [5]))  # entered; word of it comes in a later turn
        assert [e.tokens for e in await tap.take()] == [[5]]
        waits = asyncio.ensure_future(tap.take())
        await asyncio.sleep(0)
        tap.tell()
        await asyncio.sleep(0)
        assert not waits.done()
        tap.put(TokenEvent(1, [6]))
        assert [e.tokens for e in await waits] == [[6]]

    asyncio.run(work())


def test_closing_tells_the_engine_once(tmp_path: Path) -> None:
    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        link.open([request(1)])
        link.close([1])
        link.close([1])
        link.close([99])
        await until(lambda: len(engine.heard) >= 2)
        await asyncio.sleep(0.02)
        assert [c.ids for c in engine.heard if isinstance(c, msg.Abort)] == [[1]]

    with_engine(tmp_path, work)


def test_when_the_engine_dies_every_tap_ends_and_the_next_engine_is_found(tmp_path: Path) -> None:
    """Red when a request waits for an engine that is gone, or the link for one that has come."""

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        taps = [link.open([request(i)]) for i in range(5)]
        asked = asyncio.ensure_future(link.ask(msg.Flush))
        await until(lambda: len(engine.heard) == 6)
        await engine.die()
        for tap in taps:
            with pytest.raises(EngineDead):
                await asyncio.wait_for(tap.take(), 2)
        with pytest.raises(EngineDead):
            await asked
        assert link.num_open == 0 and not link.is_up
        assert "restarting" in (link.why_not_ready() or "")
        with pytest.raises(EngineDead):
            link.open([request(9)])
        link.close([1, 9])
        await engine.start()
        await until(lambda: link.is_up)
        assert link.num_restarts == 1 and link.why_not_ready() is None

    with_engine(tmp_path, work)


def test_closing_while_the_connection_closes(tmp_path: Path) -> None:
    """Red when clean-up raises in the moment the engine goes, and a place is never given back."""

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        link.open([request(1)])
        assert link._writer is not None
        link._writer.close()  # is_closing, but the link has not noticed yet
        link.close([1])
        link.watch(5.0)
        assert link.num_open == 0

    with_engine(tmp_path, work)


@pytest.mark.parametrize("junk", [b"\xff" * 50, b"\x05\x00\x00\x00\x01junk!", b"\x00" * 5])
def test_junk_ends_the_connection_and_nothing_else(tmp_path: Path, junk: bytes) -> None:
    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        tap = link.open([request(1)])
        engine.write(junk)
        with pytest.raises(EngineDead):
            await asyncio.wait_for(tap.take(), 2)
        await until(lambda: link.num_restarts == 1)

    with_engine(tmp_path, work)


def test_silence_and_standstill_are_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a stopped or stuck engine still counts as ready."""
    monkeypatch.setattr(link_module, "SILENT_S", 0.2)

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        assert link.why_not_ready() is None
        await asyncio.sleep(0.25)
        assert "silent" in (link.why_not_ready() or "")
        engine.say(BEAT)
        await until(lambda: link.why_not_ready() is None)
        engine.say(msg.Beat({}, True, False, stalled_s=4.0))
        await until(lambda: "no step for 4 s" in (link.why_not_ready() or ""))

    with_engine(tmp_path, work)


def test_a_parked_engine_is_there_and_cannot_step(tmp_path: Path) -> None:
    """Red when requests are sent to an engine without its weights, or /ready calls it broken."""

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        assert link.is_up and link.can_step
        for is_parked in (True, False, True):
            engine.say(msg.Beat({}, False, False, 0.0, is_parked))
            await until(lambda: link.can_step != is_parked)  # noqa: B023
            assert link.is_up and link.why_not_ready() is None

    with_engine(tmp_path, work)


def test_a_paused_engine_is_not_ready(tmp_path: Path) -> None:
    """Red when /ready sends requests to an engine that will not touch them."""

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        for is_paused in (True, False, True):
            asked = asyncio.ensure_future(link.set_paused(is_paused))
            num_heard = len(engine.heard)
            await until(lambda: len(engine.heard) > num_heard)  # noqa: B023
            command = engine.heard[-1]
            assert isinstance(command, msg.Pause if is_paused else msg.Resume)
            engine.say(msg.Reply(command.number))
            await asked
            engine.say(BEAT)  # sent before the pause
            assert ("paused" in (link.why_not_ready() or "")) == is_paused
        await engine.die()
        await until(lambda: not link.is_up)
        await engine.start()
        await until(lambda: link.is_up)
        assert link.why_not_ready() is None, "the next one is not paused"

    with_engine(tmp_path, work)


def test_an_unanswered_question_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "REPLY_S", 0.05)

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        with pytest.raises(EngineDead, match="did not answer"):
            await link.ask(msg.Flush)
        assert link._replies == {}
        engine.say(msg.Reply(1, 5))  # late: nobody asks any more
        engine.say(BEAT)
        await until(lambda: link.beat is not None)

    with_engine(tmp_path, work)


def test_a_tap_gives_what_came_before_the_failure() -> None:
    """Red when tokens that did arrive are lost to the error that came after them."""

    async def work() -> None:
        tap = Tap()
        tap.put(TokenEvent(1, [5]))
        tap.fail(EngineDead("gone"))
        assert [e.tokens for e in await tap.take()] == [[5]]
        with pytest.raises(EngineDead):
            await tap.take()

    asyncio.run(work())


def test_replies_find_who_asked(tmp_path: Path) -> None:
    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        first = asyncio.ensure_future(link.ask(msg.Flush))
        second = asyncio.ensure_future(link.ask(msg.Flush))
        await until(lambda: len(engine.heard) == 2)
        numbers: list[Any] = [c.number for c in engine.heard if isinstance(c, msg.Flush)]
        engine.say(msg.Reply(numbers[1], 22))
        engine.say(msg.Reply(numbers[0], None, error="no"))
        assert await second == 22
        with pytest.raises(Refused, match="no"):
            await first

    with_engine(tmp_path, work)


def test_a_restarted_engine_is_told_of_adapters_first(tmp_path: Path) -> None:
    """Red when adapters that were loaded by hand are lost with the engine, or come too late."""
    sql, other = (msg.AdapterInfo(name, f"/{name}", 8, 100) for name in ("sql", "other"))

    async def work(link: EngineLink, engine: PlayedEngine) -> None:
        engine.say(msg.AdapterList([sql, other]))
        await until(lambda: len(link.adapters) == 2)
        engine.say(msg.AdapterList([sql]))  # the other was unloaded
        await until(lambda: list(link.adapters) == ["sql"])
        await engine.die()
        await until(lambda: not link.is_up)
        await engine.start()
        await until(lambda: link.is_up)
        link.open([request(1)])
        await until(lambda: len(engine.heard) == 2)
        first, second = engine.heard
        assert isinstance(first, msg.LoadAdapter) and (first.name, first.path) == ("sql", "/sql")
        assert isinstance(second, msg.Submit) and list(link.adapters) == ["sql"]

    with_engine(tmp_path, work)
