"""open_tiers: the tiers outside the pool that were asked for, and why one of them is not there.

A disk that cannot be had is no reason not to serve: the engine says so and goes on without it. An
engine with a role is different: without its connection to the others it would be something else
than was asked for, so it does not start.
"""

from __future__ import annotations

import hmac
import logging
import os
import platform
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from quire import env
from quire.args_check import has_tiers
from quire.config import Decision, EngineArgs
from quire.disagg.connector import Mover
from quire.disagg.inline import InlineMover
from quire.disagg.sockets import SocketConnector
from quire.engine.core import EngineCore
from quire.engine.device_place import DevicePlace, open_place
from quire.engine.tier_identity import PageMakers, fingerprint
from quire.errors import NotSupported, TransferError
from quire.kv.spec import CacheSpec
from quire.kv.tier_index import TierIndex
from quire.memory.rooms import Rooms
from quire.memory.sizing import size_text
from quire.memory.transfer import PageTransfer, Transfer
from quire.native.library import find_library
from quire.native.scribe import NativeScribe
from quire.obs.log import log_event
from quire.runner.chunk_times import chunk_times
from quire.runner.runner import ModelRunner
from quire.tiers.disk import DiskShelf
from quire.tiers.memory import MemoryShelf
from quire.tiers.scribe import PlainScribe, Scribe
from quire.tiers.secret_file import read_secret
from quire.tiers.segment import Sealer
from quire.tiers.tempo import Tempo
from quire.tiers.tiers import MAX_BACKLOG, MAX_STAGED, Tiers

MEMO = "weights.json"  # remembers digests of the model's files
DISK_SIZE = 8 << 30  # where none is said
LENT_MEMORY = 1 << 30  # the same, of engines that prefill: pages wait there to be taken
LISTEN = "127.0.0.1:7300"


def _inline(sealer: Sealer, node_bytes: int, place: DevicePlace | None) -> Mover:
    return InlineMover(sealer, node_bytes, None if place is None else place.rooms.take)


def _nixl(sealer: Sealer, node_bytes: int, place: DevicePlace | None) -> Mover:
    from quire.disagg.nixl_mover import NixlMover  # an extra

    return NixlMover(sealer, node_bytes)


def _ipc(sealer: Sealer, node_bytes: int, place: DevicePlace | None) -> Mover:
    if place is None:
        raise NotSupported(
            "got kv_transport='ipc' on cpu: it is between engines on one GPU; leave it at 'sockets'"
        )
    from quire.disagg.ipc_mover import IpcMover  # msgspec comes with `quire[serve]`
    from quire.memory.shared_strip import SharedStrip  # of CUDA alone

    process = f"{platform.node()}/{os.getpid()}"
    return IpcMover(sealer, node_bytes, SharedStrip(place.strip), process, place.rooms.take)


Transport = Callable[[Sealer, int, DevicePlace | None], Mover]
TRANSPORTS: dict[str, Transport] = {"sockets": _inline, "nixl": _nixl, "ipc": _ipc}


class TierParts(NamedTuple):
    tiers: Tiers | None = None
    secret: bytes | None = None  # of prefix keys; None: random
    transfer: Transfer | None = None
    asked: TierIndex | None = None  # what policy asks, where that is not `tiers`


def open_tiers(
    args: EngineArgs, made: PageMakers, runner: ModelRunner, decisions: list[Decision]
) -> TierParts:
    """Before the engine has served anybody: how long its steps take may be measured."""
    if not has_tiers(args):
        return TierParts()
    limit, pool = _memory_limit(args), runner.pool
    memory = MemoryShelf(limit)
    if limit:
        decisions.append(holds("kv host memory", limit, made.cache))
    secret = common_secret(args)
    disk = None
    if args.kv_disk:
        folder, size = Path(args.kv_disk).expanduser(), disk_size(args)
        try:
            secret = disk_secret(folder, secret)
            mark = fingerprint(made, args, folder / MEMO)
            disk = DiskShelf(folder, size, mark, Sealer(secret), scribe())
        except (OSError, NotSupported) as error:
            decisions.append(no_disk(error))
        else:
            decisions.append(Decision("kv disk", f"{folder}, {size_text(size)}", found(disk)))
    if disk is None and not limit and args.kv_role == "both":
        return TierParts(None, secret)
    node_bytes = len(pool.groups) * pool.page_bytes
    place = rooms = None
    if made.config.device == "cpu":
        rooms = rooms_on_host(limit, disk is not None, node_bytes)
    else:
        place = open_place(pool, limit, brings=disk is not None or args.kv_role != "both")
        decisions.append(place.decision)
    costs = chunk_times(runner, made.config.sched.max_num_batched_tokens) if place else None
    beside = place.beside if place else None
    tiers = Tiers(memory, disk, Tempo(costs), node_bytes, beside, rooms)
    if args.kv_role != "both":
        assert secret is not None
        mark = fingerprint(made, args, _secret_file(args).with_name("kv-weights.json"))
        own = hmac.digest(secret, mark, "sha256")
        mover = TRANSPORTS[args.kv_transport](Sealer(own), node_bytes, place)
        tiers.remote = _connector(args, memory, mover, own, decisions)
    if place is None:
        return TierParts(tiers, secret, PageTransfer(pool, tiers))
    transfer = place.transfer(pool, tiers)
    transfer.rehearse()
    if args.kv_role == "prefill" and args.kv_transport == "ipc":
        tiers.raiser = transfer.raised
    return TierParts(tiers, secret, transfer)


def rooms_on_host(limit: int, has_disk: bool, node_bytes: int) -> Rooms:
    """Memory for pages that are kept, and for those on their way to the disk or from it."""
    most = limit + (MAX_STAGED + max(MAX_BACKLOG, limit // 2) if has_disk else 0)
    return Rooms(most // node_bytes + 1, node_bytes, is_locked=False)


def planned_tiers(args: EngineArgs, cache: CacheSpec) -> list[Decision]:
    """What each tier would hold, before anything is opened: for `quire inspect`."""
    sizes = {"kv host memory": _memory_limit(args)}
    if args.kv_disk:
        sizes["kv disk"] = disk_size(args)
    return [holds(what, size, cache) for what, size in sizes.items() if size]


def _memory_limit(args: EngineArgs) -> int:
    return args.kv_host_memory or (LENT_MEMORY if args.kv_role == "prefill" else 0)


def disk_size(args: EngineArgs) -> int:
    return args.kv_disk_size or DISK_SIZE


def holds(what: str, size: int, cache: CacheSpec, whose: str = "") -> Decision:
    tokens = size // (len(cache.groups) * cache.page_bytes) * cache.page_size
    return Decision(what, size_text(size) + whose, f"{tokens:,} tokens that the pool may forget")


def no_disk(why: Exception) -> Decision:
    log_event("kv_disk_off", severity=logging.WARNING, reason=str(why))
    return Decision("kv disk", "off", str(why))


def connect_tiers(parts: TierParts, core: EngineCore, runner: ModelRunner) -> None:
    """Pages are saved and loaded from now on; whatever ends the engine writes what is left."""
    tiers = parts.tiers
    if tiers is None:
        return
    core.scheduler.kv.connect(parts.asked or tiers)
    runner.transfer = parts.transfer
    core.on_step, core.nap = tiers.tempo.stepped, tiers.nap
    weakref.finalize(core, tiers.close)


def _secret_file(args: EngineArgs) -> Path:
    return Path(args.kv_secret or env.cache_folder() / "kv-secret").expanduser()


def common_secret(args: EngineArgs) -> bytes | None:
    """Of engines that find each other's pages; None: there are none."""
    if args.kv_role == "both" and not args.kv_secret:
        return None
    path = _secret_file(args)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return read_secret(path)
    except OSError as error:
        raise NotSupported(f"cannot use {path} as kv_secret: {error}; name another file") from error


def disk_secret(folder: Path, secret: bytes | None = None) -> bytes:
    """Of a folder, which is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return secret or read_secret(folder / "secret")


def scribe() -> Scribe:
    library = find_library().library
    if library is None or not library.can_seal():
        return PlainScribe()
    return NativeScribe(library)


def found(disk: DiskShelf) -> str:
    text = f"{len(disk):,} pages of this model found, {size_text(disk.num_bytes)} in use"
    if disk.num_foreign:
        text += f"; {disk.num_foreign} files are of another model, form or version"
    return text


def _connector(
    args: EngineArgs, memory: MemoryShelf, mover: Mover, own: bytes, decisions: list[Decision]
) -> SocketConnector:
    """`own` is what engines of another model, form or version do not have."""
    listen = (args.kv_listen or LISTEN) if args.kv_role == "prefill" else None
    try:
        connector = SocketConnector(memory, mover, own, listen, args.kv_peers)
    except (OSError, TransferError) as error:
        raise NotSupported(
            f"cannot offer pages at {listen}: {error}; choose another with kv_listen"
        ) from error
    what = f"offers pages at {connector.address}" if listen else f"asks {', '.join(args.kv_peers)}"
    why = f"engines with the secret in {_secret_file(args)} and the same model"
    decisions.append(Decision("kv role", f"{args.kv_role}, {what}", why))
    return connector
