"""EngineProcess: the engine's loop behind a unix socket. One API process is connected at a time.

The main thread steps; a reader thread turns frames into commands; a writer thread sends reports, so
that neither a slow peer nor a large frame ever holds a step; a beat thread says once a second that
the process lives and how long ago the loop last turned. When the API process goes away all its
requests are aborted and the next connection is awaited. Nothing here listens on the network.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.engine import commands as msg
from quire.engine.commands import QUEUE_TIMEOUT, Command, Report
from quire.engine.guard import Guard
from quire.engine.snapshot import Snapshots
from quire.engine.wire import Codec, receive
from quire.errors import EngineDead, QuireError
from quire.kv.check import check_in_slices
from quire.obs.log import log_event
from quire.request import Request, RequestId
from quire.spec.speculation import Speculation
from quire.step import TokenEvent
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.build import Engine
    from quire.runner.expert_loads import LoadReader

BEAT_S = 1.0
IDLE_WAIT_S = 0.5
CHECK_EVERY_S = 10.0  # idle bookkeeping checks walk every page: not after each short request
CHECK_LATEST_S = 60.0  # a check this late does not stop when a command arrives
STUCK = 71  # exit code
MAX_UNSENT = 256 << 20  # bytes a peer may leave unread before it counts as gone


class Peer:
    """One connected API process: a reader and a writer thread around a socket."""

    def __init__(self, connection: socket.socket, wake: Callable[[], None]) -> None:
        self.inbox: deque[Command] = deque()
        self.is_gone = False
        self._connection, self._wake = connection, wake
        self._codec: Codec[Report] = Codec(Report)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unsent, self._counting = 0, threading.Lock()
        for work in (self._read, self._write):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def send(self, report: Report) -> None:
        frame = self._codec.frame(report)
        with self._counting:
            self._unsent += len(frame)
        if self._unsent > MAX_UNSENT:
            log_event("peer_too_slow", severity=logging.ERROR, unsent_bytes=self._unsent)
            return self.close()
        self._outbox.put(frame)
        return None

    def close(self) -> None:
        self.is_gone = True
        self._outbox.put(None)
        with suppress(OSError):  # it may be gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._wake()

    def _read(self) -> None:
        codec: Codec[Command] = Codec(Command)
        try:
            while (body := receive(self._connection)) is not None:
                self.inbox.append(codec.decode(body))
                self._wake()
        except EngineDead as error:
            log_event("bad_frame", severity=logging.ERROR, reason=str(error))
        finally:
            self.close()

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            try:
                self._connection.sendall(frame)
            except OSError:
                break
            with self._counting:
                self._unsent -= len(frame)
        self._connection.close()


class Patience(NamedTuple):
    """How long a step may take before stacks are printed (`dump_s`) and before the process exits
    (`exit_s`), and how long a request may wait to start (`queue_s`)."""

    dump_s: float
    exit_s: float
    queue_s: float


@dataclass(slots=True)
class Profile:
    """A profile being taken."""

    number: int  # of the command to answer
    num_wanted: int
    profiler: Any
    num_seen: int = 0


class EngineProcess:
    def __init__(
        self,
        engine: Engine,
        address: Path,
        load_seconds: float,
        patience: Patience,
        loads: LoadReader | None = None,
    ) -> None:
        self.engine, self.core, self._loads = engine, engine.core, loads
        self.load_seconds, self.patience = load_seconds, patience
        self._wake = threading.Event()
        self._listener = _listen(address)
        self._peer: Peer | None = None
        self._requests: dict[RequestId, Request] = {}
        self._guard = Guard(self.core)
        self._snapshots = Snapshots(self.core)
        self._next_expiry = 0.0
        self._watch_every = 0.0
        self._next_snapshot = 0.0
        self._next_check = 0.0
        self._is_paused = False
        self._turned = time.monotonic()
        self._profile: Profile | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            msg.Submit: self._submit,
            msg.Abort: self._abort,
            msg.Flush: self._flush,
            msg.Pause: self._pause,
            msg.Resume: self._resume,
            msg.Profile: self._start_profile,
            msg.Watch: self._watch,
        }

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until the process is killed."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        while True:
            self._turned = time.monotonic()
            self._take_commands()
            if self._can_step:
                self._step()
            else:
                if self._profile is not None:  # nobody waits for steps that may never come
                    self._end_profile(self._profile)
                self._rest()
            self._expire_waiting()
            self._maybe_snapshot()
            if self._loads is not None:
                self._loads.poll()

    @property
    def _can_step(self) -> bool:
        return self.core.has_work and not self._is_paused

    def _take_commands(self) -> None:
        peer = self._peer
        if peer is None:
            return
        while peer.inbox:
            command = peer.inbox.popleft()
            self._handlers[type(command)](command)
        if peer.is_gone and not peer.inbox:
            self._forget_peer()

    def _forget_peer(self) -> None:
        for request_id in list(self._requests):
            self.core.abort(request_id)
        self._requests.clear()
        if self._profile is not None:  # nobody is left to tell
            self._profile.profiler.stop()
        self._profile = None
        self._peer, self._is_paused, self._watch_every = None, False, 0.0

    def _step(self) -> None:
        begun = time.monotonic()
        events = self._guard.step()
        if self._watch_every:
            self._snapshots.observe(self.core.last_plan, time.monotonic() - begun)
        self._report(events)
        if self._profile is not None:
            self._profile.num_seen += 1
            if self._profile.num_seen == self._profile.num_wanted:
                self._end_profile(self._profile)

    def _report(self, events: list[TokenEvent]) -> None:
        if not events:
            return
        about = []
        for event in events:
            request = self._requests.get(event.request_id)
            if request is None:
                continue
            # Also at the first token: a stop string ends a request on the other side.
            if event.finish is not None or request.num_output <= len(event.tokens):
                about.append(msg.about(request))
            if event.finish is not None:
                del self._requests[event.request_id]
        if self._peer is not None:
            self._peer.send(msg.Events(events, about))

    def _rest(self) -> None:
        now = time.monotonic()
        if not self.core.has_work and now >= self._next_check:
            self._check_pages()
        wait = IDLE_WAIT_S
        if self._watch_every:
            wait = min(wait, max(0.0, self._next_snapshot - now))
        self._wake.wait(wait)
        self._wake.clear()

    def _check_pages(self) -> None:
        """Check the page bookkeeping; stop when a command arrives and begin again when idle.

        A check that is overdue does not stop, so a request may wait a fraction of a second."""
        is_overdue = time.monotonic() > self._next_check + CHECK_LATEST_S
        for _ in check_in_slices(self.core.scheduler.kv):
            if self._wake.is_set() and not is_overdue:
                return
        self._next_check = time.monotonic() + CHECK_EVERY_S

    def _expire_waiting(self) -> None:
        """End requests that have waited too long to start. A preempted request has started."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        self._next_expiry = now + IDLE_WAIT_S
        oldest = now - self.patience.queue_s
        late = [
            request.id
            for request in self.core.scheduler.waiting
            if request.timing.scheduled is None and request.timing.arrival < oldest
        ]
        for request_id in late:
            events = self.core.abort(request_id, "error")
            self._report([event._replace(error=QUEUE_TIMEOUT) for event in events])

    # ------------------------------------------------------------ commands

    def _submit(self, command: msg.Submit) -> None:
        requests = msg.requests_of(command)
        self._requests.update({request.id: request for request in requests})
        try:
            msg.check_ids(requests[0], self.engine.spec.vocab_size)
            self.core.add(requests[0])
        except QuireError as error:
            events = [TokenEvent(r.id, (), finish="error", error=str(error)) for r in requests]
            self._report(events)

    def _abort(self, command: msg.Abort) -> None:
        for request_id in command.ids:
            self._report(self.core.abort(RequestId(request_id)))

    def _flush(self, command: msg.Flush) -> None:
        self._reply(command.number, self.core.scheduler.kv.flush())

    def _pause(self, command: msg.Pause) -> None:
        self._is_paused = True
        self._reply(command.number)

    def _resume(self, command: msg.Resume) -> None:
        self._is_paused = False
        self._reply(command.number)

    def _watch(self, command: msg.Watch) -> None:
        self._watch_every = 1.0 / command.hz if command.hz > 0 else 0.0
        self._next_snapshot = 0.0

    def _start_profile(self, command: msg.Profile) -> None:
        if self._profile is not None:
            return self._reply(command.number, error="a profile is being taken already")
        if not self._can_step:
            state = "paused" if self._is_paused else "idle"
            error = f"the engine is {state}, so there are no steps to record; ask while it works"
            return self._reply(command.number, error=error)
        import torch.profiler as tp

        profiler = tp.profile()
        profiler.start()
        self._profile = Profile(command.number, command.num_steps, profiler)
        return None

    def _end_profile(self, profile: Profile) -> None:
        self._profile = None
        profile.profiler.stop()
        path = Path.cwd() / f"quire-profile-{os.getpid()}-{profile.number}.json"
        profile.profiler.export_chrome_trace(str(path))
        self._reply(profile.number, {"trace": path.name, "num_steps": profile.num_seen})

    def _reply(self, number: int, value: msg.Value = None, error: str | None = None) -> None:
        if self._peer is not None:
            self._peer.send(msg.Reply(number, value, error))

    # ------------------------------------------------------------ other threads

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            while self._peer is not None:  # the loop is still clearing up after the last one
                self._wake.set()
                time.sleep(0.01)
            peer = Peer(connection, self._wake.set)
            peer.send(self._hello())
            self._peer = peer
            self._wake.set()

    def _hello(self) -> msg.Hello:
        config, spec = self.engine.config, self.engine.spec
        return msg.Hello(
            pid=os.getpid(),
            version=__version__,
            architecture=spec.architecture,
            max_model_len=config.sched.max_model_len,
            max_num_seqs=config.sched.max_num_seqs,
            max_num_batched_tokens=config.sched.max_num_batched_tokens,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            eos_ids=list(spec.eos_ids),
            decisions=list(config.decisions),
            load_seconds=self.load_seconds,
            num_params=spec.num_params,
        )

    def _beat(self) -> None:
        has_dumped = False
        while True:
            time.sleep(BEAT_S)
            stalled = time.monotonic() - self._turned if self._can_step else 0.0
            if stalled > self.patience.exit_s:
                log_event("engine_stuck", severity=logging.ERROR, seconds=round(stalled))
                os._exit(STUCK)
            if stalled > self.patience.dump_s and not has_dumped:
                faulthandler.dump_traceback()
            has_dumped = stalled > self.patience.dump_s
            peer = self._peer
            if peer is None or peer.is_gone:
                continue
            try:
                counts = self.core.scheduler.stats().as_dict()
                if isinstance(self.core.drafts, Speculation):
                    counts |= self.core.drafts.counts.as_dict()
            except RuntimeError:  # a dict changed size under our feet: the next beat will do
                continue
            experts = self._loads.take() if self._loads is not None else {}
            peer.send(msg.Beat(counts, self.core.has_work, self._is_paused, stalled, experts))

    def _maybe_snapshot(self) -> None:
        now = time.monotonic()
        if not self._watch_every or now < self._next_snapshot or self._peer is None:
            return
        self._next_snapshot = now + self._watch_every
        self._peer.send(msg.Snapshot(self._snapshots.take()))


def _listen(address: Path) -> socket.socket:
    """A unix socket only this user can reach (its folder is 0700)."""
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(address))
    os.chmod(address, 0o600)
    listener.listen(1)
    return listener
