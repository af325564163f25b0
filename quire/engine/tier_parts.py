"""open_tiers: the tiers outside the pool that were asked for, and why one of them is not there.

A disk that cannot be had is no reason not to serve: the engine says so and goes on without it.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import NamedTuple

from quire.config import Decision, EngineArgs
from quire.engine.core import EngineCore
from quire.engine.tier_identity import PageMakers, fingerprint
from quire.errors import NotSupported
from quire.memory.sizing import size_text
from quire.memory.transfer import PageTransfer
from quire.obs.log import log_event
from quire.runner.runner import ModelRunner
from quire.tiers.disk import DiskShelf
from quire.tiers.memory import MemoryShelf
from quire.tiers.secret_file import read_secret
from quire.tiers.segment import Sealer
from quire.tiers.tempo import Tempo
from quire.tiers.tiers import Tiers

DISK_SIZE = 8 << 30  # where none is said


class TierParts(NamedTuple):
    tiers: Tiers | None
    secret: bytes | None  # of prefix keys; None: random


def open_tiers(
    args: EngineArgs, made: PageMakers, node_bytes: int, decisions: list[Decision]
) -> TierParts:
    if not args.kv_disk and not args.kv_host_memory:
        return TierParts(None, None)
    memory = MemoryShelf(args.kv_host_memory or 0)
    if args.kv_host_memory:
        holds = args.kv_host_memory // node_bytes * made.cache.page_size
        why = f"{holds:,} tokens that the pool may forget"
        decisions.append(Decision("kv host memory", size_text(args.kv_host_memory), why))
    secret, disk = None, None
    if args.kv_disk:
        folder, limit = Path(args.kv_disk).expanduser(), args.kv_disk_size or DISK_SIZE
        try:
            secret, disk = _open_disk(folder, limit, made, args)
        except (OSError, NotSupported) as error:
            decisions.append(Decision("kv disk", "off", str(error)))
            log_event("kv_disk_off", severity=logging.WARNING, reason=str(error))
        else:
            decisions.append(Decision("kv disk", f"{folder}, {size_text(limit)}", _found(disk)))
    if disk is None and not args.kv_host_memory:
        return TierParts(None, None)
    return TierParts(Tiers(memory, disk, Tempo(), node_bytes), secret)


def connect_tiers(tiers: Tiers, core: EngineCore, runner: ModelRunner) -> None:
    """Pages are saved and loaded from now on; whatever ends the engine writes what is left."""
    core.scheduler.kv.connect(tiers)
    runner.transfer = PageTransfer(runner.pool, tiers)
    core.on_step = tiers.tempo.stepped
    weakref.finalize(core, tiers.close)


def _open_disk(
    folder: Path, limit: int, made: PageMakers, args: EngineArgs
) -> tuple[bytes, DiskShelf]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = read_secret(folder / "secret")
    mark = fingerprint(made, args, folder / "weights.json")
    return secret, DiskShelf(folder, limit, mark, Sealer(secret))


def _found(disk: DiskShelf) -> str:
    text = f"{len(disk):,} pages of this model found, {size_text(disk.num_bytes)} in use"
    if disk.num_foreign:
        text += f"; {disk.num_foreign} files are of another model, form or version"
    return text
