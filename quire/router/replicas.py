"""Replicas: several whole servers on this machine behind one address, and their lives.

    this process ── router     listens where `quire serve` was told to
                 └─ serve x N   on ports of their own that this machine alone can reach

Each child is a `quire serve` with a supervisor of its own, so an engine or API process that dies is
brought back inside it; here a child that ends is started again. Nothing outlives this process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from quire import env
from quire.obs.log import log_event
from quire.router.main import prompt_keys_of
from quire.router.main import serve as serve_router
from quire.router.settings import RouterSettings, UpstreamAddress
from quire.server.lifeline import die_with_parent, prctl

TICK_S = 0.1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
MAX_CRASHES = 6  # in a row, without ever having run for STEADY_S
STEADY_S = 60.0
STOP_S = 40.0


@dataclass(slots=True)
class Replica:
    """One child, and how often it has ended."""

    name: str
    port: int
    words: tuple[str, ...]
    env: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    crashes: int = 0
    not_before: float = field(default=0.0)

    def start(self) -> None:
        self.started = time.monotonic()
        if sys.platform == "linux":
            prctl()
        self.process = subprocess.Popen(
            self.words,
            env=self.env,
            start_new_session=True,  # Ctrl-C is ours to pass on
            preexec_fn=die_with_parent,
        )

    def tick(self, now: float) -> bool:
        """Start it when it is time; False: it ends whenever it is started."""
        if self.process is None:
            if now >= self.not_before:
                self.start()
            return True
        code = self.process.poll()
        if code is None:
            return True
        self.crashes = 1 if now - self.started > STEADY_S else self.crashes + 1
        pause = min(FIRST_PAUSE_S * 2 ** (self.crashes - 1), LONGEST_PAUSE_S)
        log_event("replica_ended", replica=self.name, exit_code=code, restart_in_s=pause)
        self.process, self.not_before = None, now + pause
        return self.crashes <= MAX_CRASHES

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.is_running():
            self.process.send_signal(number)


class Replicas:
    def __init__(
        self, shares: Sequence[Sequence[str]], words: Sequence[str], settings: RouterSettings
    ) -> None:
        """`shares`: for each replica the GPUs that it sees (`gpus.py`). `words`: what each
        `quire serve` is told, but for its address."""
        self.replicas = []
        for number, (port, gpus) in enumerate(zip(free_ports(len(shares)), shares, strict=True)):
            line, own_env = serve_line(words, port), env.of_child(settings.admin_key, gpus)
            self.replicas.append(Replica(f"replica-{number}", port, line, own_env))
            if gpus:
                log_event("replica_gpus", replica=f"replica-{number}", gpus=",".join(gpus))
        upstreams = tuple(UpstreamAddress(r.name, "127.0.0.1", r.port) for r in self.replicas)
        self.settings = replace(settings, upstreams=upstreams)

    def run(self) -> int:
        for replica in self.replicas:
            replica.start()
        try:
            return asyncio.run(self._run())
        finally:
            for replica in self.replicas:
                replica.stop(signal.SIGKILL)

    async def _run(self) -> int:
        router = asyncio.ensure_future(serve_router(self.settings, prompt_keys_of(self.settings)))
        watch = asyncio.ensure_future(self._watch())
        await asyncio.wait([router, watch], return_when=asyncio.FIRST_COMPLETED)
        if watch.done():  # one cannot be started: what the others serve is not what was asked for
            os.kill(os.getpid(), signal.SIGTERM)
            await router
            code = 1
        else:
            watch.cancel()
            code = router.result()
        await self._stop()
        return code

    async def _watch(self) -> None:
        while all(replica.tick(time.monotonic()) for replica in self.replicas):
            await asyncio.sleep(TICK_S)

    async def _stop(self) -> None:
        deadline = time.monotonic() + STOP_S
        for replica in self.replicas:
            replica.stop()
        for replica in self.replicas:
            while replica.process is not None and replica.process.poll() is None:
                if time.monotonic() > deadline:
                    with suppress(OSError):
                        replica.stop(signal.SIGKILL)
                    break
                await asyncio.sleep(TICK_S)


def admin_key_for(has_keys: bool) -> str:
    """A key for the router alone; without any key everybody on this machine is an administrator."""
    return secrets.token_urlsafe(32) if has_keys else ""


def serve_line(words: Sequence[str], port: int) -> tuple[str, ...]:
    """The command of a server that this machine alone can reach."""
    address = ("--host", "127.0.0.1", "--port", str(port))
    return (sys.executable, "-m", "quire", "serve", *words, *address)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
