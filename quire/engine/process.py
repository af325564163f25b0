"""EngineProcess: the engine's loop behind a unix socket, for one API process or several.

The main thread steps; each connected API process has a reader and a writer thread (`peer.py`); a
beat thread says once a second that the process lives and how long ago the loop last turned. A
connection has a range of request ids of its own, so whose news an event is can be read off its id.
When an API process goes away its requests are aborted. Nothing here listens on the network.
"""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.engine import commands as msg
from quire.engine.adapter_verbs import AdapterVerbs
from quire.engine.commands import ADAPTER_GONE, QUEUE_TIMEOUT
from quire.engine.giving_way import open_urge
from quire.engine.guard import Guard
from quire.engine.idle_work import IdleWork
from quire.engine.lending import ticket_for
from quire.engine.park_verbs import ParkVerbs
from quire.engine.peer import ID_BITS, Peer, listen
from quire.engine.snapshot import Snapshots
from quire.errors import QuireError
from quire.kv.cache_news import CacheLog
from quire.lora.adapters import NoAdapter
from quire.obs.log import log_event
from quire.request import Request, RequestId
from quire.spec.jumps import Jumps
from quire.spec.speculation import Speculation
from quire.step import TokenEvent
from quire.version import __version__

if TYPE_CHECKING:
    from quire.engine.build import Engine
    from quire.runner.ahead import Ahead
    from quire.runner.expert_loads import LoadReader
    from quire.runner.late_work import LateWork

BEAT_S = 1.0
IDLE_WAIT_S = 0.5
STUCK = 71  # exit code
NO_EXPERTS: Mapping[int, list[int]] = MappingProxyType({})


class Patience(NamedTuple):
    """How long a step may take before stacks are printed (`dump_s`) and before the process exits
    (`exit_s`), and how long a request may wait to start (`queue_s`)."""

    dump_s: float
    exit_s: float
    queue_s: float


@dataclass(slots=True)
class Profile:
    """A profile being taken."""

    peer: Peer  # who asked
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
        late: LateWork | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.engine, self.core, self._loads, self._late = engine, engine.core, loads, late
        self.load_seconds, self.patience = load_seconds, patience
        self._wake, self._urge = threading.Event(), open_urge(engine)
        self._listener = listen(address)
        self._peers: dict[int, Peer] = {}  # by number; changed by the main thread alone
        self._arriving: deque[Peer] = deque()
        self._requests: dict[RequestId, Request] = {}
        self._guard = Guard(self.core)
        self._snapshots = Snapshots(self.core, engine.tiers)
        self._next_expiry = 0.0
        self._watch_every = 0.0
        self._next_snapshot = 0.0
        self._idle = IdleWork(self.core.scheduler.kv, self._wake, ahead, late)
        self._pausers: set[int] = set()  # numbers of peers that paused; anyone may resume
        self._turned = time.monotonic()
        self._profile: Profile | None = None
        self._cache_log: CacheLog | None = None  # from the first question on
        self._adapters = AdapterVerbs(self.core.adapters, self._peers)
        self._park = ParkVerbs(engine.parking, self._is_busy, self._send_beat)
        self._handlers: dict[type, Callable[[Peer, Any], None]] = {
            msg.Submit: self._submit,
            msg.Abort: self._abort,
            msg.Flush: self._flush,
            msg.Pause: self._pause,
            msg.Resume: self._resume,
            msg.Profile: self._start_profile,
            msg.Watch: self._watch,
            msg.TellCache: self._tell_cache,
            **self._park.guarded(self._adapters.handlers),
            **self._park.handlers,
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
        return self.core.has_work and not self._is_paused and not self._park.is_parked

    def _is_busy(self) -> bool:
        return self.core.has_work or bool(self._requests)

    @property
    def _is_paused(self) -> bool:
        return bool(self._pausers)

    def _take_commands(self) -> None:
        self._urge.clear()
        while self._arriving:
            peer = self._arriving.popleft()
            self._peers[peer.number] = peer
            self._adapters.greet(peer)
        for peer in list(self._peers.values()):
            while peer.inbox:
                command = peer.inbox.popleft()
                self._handlers[type(command)](peer, command)
            if peer.is_gone and not peer.inbox:
                self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.number]
        for request_id in [id for id in self._requests if id >> ID_BITS == peer.number]:
            self.core.abort(request_id)
            del self._requests[request_id]
        if self._profile is not None and self._profile.peer is peer:  # nobody is left to tell
            self._profile.profiler.stop()
            self._profile = None
        self._set_watch()
        self._pausers.discard(peer.number)  # its successor may be here already, and knows nothing

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
                about.append(msg.about(request, ticket_for(request, event, self.engine)))
            if event.finish is not None:
                del self._requests[event.request_id]
        if len(self._peers) == 1:
            for peer in self._peers.values():
                peer.send(msg.Events(events, about))
        else:
            self._share_out(events, about)

    def _share_out(self, events: list[TokenEvent], about: list[msg.About]) -> None:
        """To each its own."""
        reports: dict[int, msg.Events] = {}
        for event in events:
            number = event.request_id >> ID_BITS
            reports.setdefault(number, msg.Events([], [])).events.append(event)
        for one in about:
            reports[one.id >> ID_BITS].about.append(one)
        for number, report in reports.items():
            if number in self._peers:
                self._peers[number].send(report)

    def _rest(self) -> None:
        wait = IDLE_WAIT_S
        if not self.core.has_work and not self._park.is_parked:
            self._idle.run()
            wait = 0.0 if self._idle.is_pending else wait
        if self._watch_every:
            wait = min(wait, max(0.0, self._next_snapshot - time.monotonic()))
        self._wake.wait(wait)
        self._wake.clear()

    def _expire_waiting(self) -> None:
        """End requests that have waited too long to start. A preempted request has started."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        self._next_expiry = now + IDLE_WAIT_S
        oldest = now - self.patience.queue_s
        late = [
            request.id
            for request in self.core.waiting()
            if request.timing.scheduled is None
            and request.timing.arrival < oldest
            and not request.is_background
        ]
        for request_id in late:
            events = self.core.abort(request_id, "error")
            self._report([event._replace(error=QUEUE_TIMEOUT) for event in events])

    # ------------------------------------------------------------ commands

    def _submit(self, peer: Peer, command: msg.Submit) -> None:
        requests = msg.requests_of(command)
        if any(request.id >> ID_BITS != peer.number for request in requests):
            log_event("bad_id", severity=logging.ERROR, id=command.id)
            return peer.close()
        self._requests.update({request.id: request for request in requests})
        try:
            msg.check_ids(requests[0], self.engine.spec.vocab_size)
            self.core.add(requests[0])
        except QuireError as error:
            why = ADAPTER_GONE if isinstance(error, NoAdapter) else str(error)
            events = [TokenEvent(r.id, (), finish="error", error=why) for r in requests]
            self._report(events)
        return None

    def _abort(self, peer: Peer, command: msg.Abort) -> None:
        for request_id in command.ids:
            if request_id >> ID_BITS == peer.number:
                self._report(self.core.abort(RequestId(request_id)))

    def _flush(self, peer: Peer, command: msg.Flush) -> None:
        peer.reply(command.number, self.core.scheduler.kv.flush())

    def _tell_cache(self, peer: Peer, command: msg.TellCache) -> None:
        kv = self.core.scheduler.kv
        if self._cache_log is None:
            self._cache_log = CacheLog(kv.tree, kv.page_size)
        peer.reply(command.number, self._cache_log.since(command.epoch, command.since))

    def _pause(self, peer: Peer, command: msg.Pause) -> None:
        self._pausers.add(peer.number)
        peer.reply(command.number)
        self._send_beat()

    def _resume(self, peer: Peer, command: msg.Resume) -> None:
        self._pausers.clear()
        peer.reply(command.number)
        self._send_beat()

    def _watch(self, peer: Peer, command: msg.Watch) -> None:
        peer.watch_hz = command.hz
        self._set_watch()

    def _set_watch(self) -> None:
        """Pictures come at the pace of whoever wants most."""
        hz = max((peer.watch_hz for peer in self._peers.values()), default=0.0)
        self._watch_every = 1.0 / hz if hz > 0 else 0.0
        self._next_snapshot = 0.0

    def _start_profile(self, peer: Peer, command: msg.Profile) -> None:
        if self._profile is not None:
            return peer.reply(command.number, error="a profile is being taken already")
        if not self._can_step:
            state = "paused" if self._is_paused else "idle"
            error = f"the engine is {state}, so there are no steps to record; ask while it works"
            return peer.reply(command.number, error=error)
        import torch.profiler as tp

        profiler = tp.profile()
        profiler.start()
        self._profile = Profile(peer, command.number, command.num_steps, profiler)
        return None

    def _end_profile(self, profile: Profile) -> None:
        self._profile = None
        profile.profiler.stop()
        path = Path.cwd() / f"quire-profile-{os.getpid()}-{profile.number}.json"
        profile.profiler.export_chrome_trace(str(path))
        profile.peer.reply(profile.number, {"trace": path.name, "num_steps": profile.num_seen})

    # ------------------------------------------------------------ other threads

    def _accept(self) -> None:
        for number in itertools.count():
            connection, _ = self._listener.accept()
            peer = Peer(connection, self._wake.set, number, self._urge.set)
            peer.send(self._hello(peer))
            self._arriving.append(peer)
            self._wake.set()

    def _hello(self, peer: Peer) -> msg.Hello:
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
            first_id=peer.number << ID_BITS,
            adapters=self._adapters.listed(),
            is_parked=self._park.is_parked,
        )

    def _sizes(self) -> dict[str, float]:
        cache, group = self.engine.config.cache, self.engine.group
        num_ranks = 1 if group is None else group.size
        slots = self.core.scheduler.kv.allocator.num_pages * cache.page_size
        return {"kv_token_bytes": cache.token_bytes, "kv_slots": slots, "num_ranks": num_ranks}

    def _beat(self) -> None:
        has_dumped = False
        while True:
            time.sleep(BEAT_S)
            stalled = time.monotonic() - self._turned if self._can_step else 0.0
            if self.engine.group is not None:
                self.engine.group.exit_if_lost()
            if stalled > self.patience.exit_s:
                log_event("engine_stuck", severity=logging.ERROR, seconds=round(stalled))
                os._exit(STUCK)
            if stalled > self.patience.dump_s and not has_dumped:
                faulthandler.dump_traceback()
            has_dumped = stalled > self.patience.dump_s
            experts = self._loads.take() if self._peers and self._loads is not None else {}
            self._send_beat(stalled, experts)

    def _send_beat(
        self, stalled: float = 0.0, experts: Mapping[int, list[int]] = NO_EXPERTS
    ) -> None:
        peers = [peer for peer in list(self._peers.values()) if not peer.is_gone]
        try:
            counts = self._counts() if peers else {}
        except RuntimeError:  # a dict changed size under our feet: the next beat will do
            return
        has_work, is_paused, is_parked = self.core.has_work, self._is_paused, self._park.is_parked
        for peer in peers:
            peer.send(msg.Beat(counts, has_work, is_paused, stalled, is_parked, dict(experts)))

    def _counts(self) -> dict[str, float]:
        counts = self.core.scheduler.stats().as_dict() | self._sizes()
        if self._late is not None:
            counts |= self._late.as_dict()
        if (balancer := self.engine.runner.balancer) is not None:
            counts |= balancer.as_dict()
        if isinstance(self.core.drafts, Speculation | Jumps):
            counts |= self.core.drafts.counts.as_dict()
        if self.engine.tiers is not None:
            counts |= self.engine.tiers.as_dict()
        return counts

    def _maybe_snapshot(self) -> None:
        now = time.monotonic()
        if not self._watch_every or now < self._next_snapshot:
            return
        self._next_snapshot = now + self._watch_every
        picture = msg.Snapshot(self._snapshots.take())
        for peer in self._peers.values():
            if peer.watch_hz > 0:
                peer.send(picture)
