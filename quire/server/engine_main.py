"""The engine process: settings on stdin, a unix socket in the runtime folder, then the loop.

Exit codes tell the supervisor what to do: 2 is the user's mistake and final, others are crashes.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from quire.errors import BadRequest, CheckpointError, NotSupported, OutOfMemory, QuireError
from quire.obs.log import configure_logging
from quire.server.lifeline import begin
from quire.server.model_files import Home, ModelFolder
from quire.server.settings import ServeSettings

if TYPE_CHECKING:
    from quire.engine.build import Engine

BAD_INPUT, FAILED = 2, 1
FLUSH_S = 2.0  # to write pages that wait for the disk
WAKE_LOOK_S = 0.02


def main() -> int:
    begun = time.monotonic()
    gc.disable()  # until all that lives as long as the process is there
    settings = begin(ServeSettings, int(sys.argv[1]))
    secrets = [*settings.api_keys, *settings.admin_keys]
    configure_logging(settings.log_format, settings.log_level, secrets)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the supervisor asks for stacks before it kills
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; parent decides
    folder = ModelFolder(Path(settings.runtime_folder))
    try:
        if settings.is_parked:
            wait_to_load(folder)
            begun = time.monotonic()
        engine = _build(settings, folder)
        from quire.engine.process import EngineProcess, Patience
        from quire.runner.ahead import Ahead
        from quire.runner.expert_loads import LoadReader
        from quire.runner.late_work import LateWork

        address = folder.socket
        patience = Patience(
            settings.stall_s, settings.stall_kill_s, settings.limits.queue_timeout_s
        )
        loads = LoadReader.of(engine.runner.model)
        seconds, late = time.monotonic() - begun, LateWork(engine.runner)
        ahead = Ahead.of(engine.runner, engine.config.sched.max_num_batched_tokens)
        process = EngineProcess(engine, address, seconds, patience, loads, late, ahead)
    except QuireError as error:
        return _failed(error, folder)
    # What start-up made lives as long as the process: no full collection shall walk it again, which
    # with torch loaded takes 90 ms in the middle of somebody's answer.
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGTERM, _leave)
    try:
        process.run()
    finally:
        if engine.tiers is not None:
            engine.tiers.close(FLUSH_S)
    return 0


def _build(settings: ServeSettings, folder: ModelFolder) -> Engine:
    from quire.load.open import open_model

    opened = open_model(settings.engine)
    import torch  # after what needs none

    from quire.engine.build import build_engine

    given = (settings.engine, opened.checkpoint, opened.tokenizer)
    try:
        engine = build_engine(*given, parks=settings.parks)
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        folder.fail(" ".join(str(error).split()))
        if torch.cuda.is_available() and settings.engine.device != "cpu":
            folder.set_short()
        raise
    if engine.parking is not None:
        folder.set_home(Home(engine.config.device, engine.parking.weight_bytes))
    return engine


def _failed(error: QuireError, folder: ModelFolder) -> int:
    """The exit code of an engine that did not start."""
    text = " ".join(str(error).split())
    print(f"error: {text}", file=sys.stderr, flush=True)
    folder.fail(text)
    is_final = isinstance(error, (BadRequest, CheckpointError, NotSupported, OutOfMemory))
    return BAD_INPUT if is_final else FAILED


def _leave(number: int, frame: FrameType | None) -> None:
    """What the supervisor asks for when the API processes are gone."""
    sys.exit(0)


def wait_to_load(folder: ModelFolder) -> None:
    """Import what loading takes, and wait to be told."""
    woken = threading.Event()
    signal.signal(signal.SIGUSR2, lambda number, frame: woken.set())
    import quire.engine.build
    import quire.engine.process  # noqa: F401

    folder.set_parked(True)
    while not woken.wait(WAKE_LOOK_S):  # a signal does not end a wait
        pass


if __name__ == "__main__":
    sys.exit(main())
