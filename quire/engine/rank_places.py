"""The place of a rank among those that hold a model: its device, and its ways to the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch

from quire.config import Decision, EngineArgs, Parallel
from quire.dist.comm import Comm
from quire.dist.devices import GRAPHED, Carrier, carrier_of, number_of, places_of
from quire.dist.gloo import GlooComm, Meeting, Network
from quire.dist.host import HostComm, HostLink
from quire.dist.hush import Hush, HushedComm, HushedLink
from quire.dist.ranks import Ranks
from quire.dist.ring import GlooRing
from quire.dist.stages import Link, Stage
from quire.engine.rank_messages import Begin
from quire.engine.usable_cpus import usable_cpus
from quire.native.exchange import SharedComm
from quire.native.library import find_library
from quire.runner.device import pick_device

if TYPE_CHECKING:
    from quire.dist.nccl import NcclComm
    from quire.dist.peer import PeerComm

CARRIED = {
    "shared": "memory that all have mapped",
    "gloo": "gloo",
    "network": "gloo",
    "nccl": "NCCL",
    "peer": "memory of GPUs that all have mapped",
}


def threads_shared(args: EngineArgs) -> EngineArgs:
    """With the threads that each rank of this machine has, where nobody says how many."""
    num_here = args.parallel.num_ranks // args.parallel.nnodes
    if args.num_threads is not None or num_here == 1:
        return args
    return replace(args, num_threads=max(1, usable_cpus() // num_here))


def host_carrier(nodes: Parallel) -> str:
    """How processes on these machines talk through memory of the host."""
    if nodes.nnodes > 1:
        return "network"
    return "gloo" if find_library().library is None else "shared"


def rank_places(args: EngineArgs) -> tuple[str, ...]:
    """The GPU of each rank; none where ranks are on CPUs, or where there is one alone."""
    num_ranks = args.parallel.num_ranks
    if num_ranks == 1 or pick_device(args.device)[0].type == "cpu":
        return ()
    return places_of(args.device, num_ranks, torch.cuda.device_count())


def carrier_between(args: EngineArgs, places: tuple[str, ...], on_host: str) -> Carrier:
    """How ranks talk that share layers, at these places."""
    return carrier_of(places, args.parallel.num_beside, on_host, maps_memory)


def maps_memory(one: str, other: str) -> bool:
    """Whether processes on these GPUs can map each other's memory. That it can be shared at all is
    tried on the first GPU: on another one this process would take memory."""
    from quire.dist.mapped import can_be_shared

    first, second = number_of(one), number_of(other)
    if first != second and not torch.cuda.can_device_access_peer(first, second):
        return False
    return can_be_shared(torch.device("cuda", 0))


def rank_decisions(
    asked: Parallel, places: tuple[str, ...], carrier: Carrier
) -> tuple[Decision, ...]:
    """What is said of ranks on GPUs before their model is looked at."""
    if not places:
        return ()
    how, made = CARRIED[carrier.name], [Decision("ranks", ", ".join(places), str(asked))]
    if asked.num_beside > 1:
        way = how if carrier.name in GRAPHED else f"{how}, through memory of the host"
        made.append(Decision("between ranks", way, carrier.why))
    if asked.pipeline_parallel_size > 1:
        why = "a step's rows once for each stage"
        made.append(Decision("between stages", "gloo, through memory of the host", why))
    return tuple(made)


def ranks_of(begin: Begin, lives: Callable[[], bool] = lambda: True, own_host: str = "") -> Ranks:
    """The place of a rank among those that were told the same; `lives`: whether they still do.
    `own_host`: where others reach us, if not where they reach the first rank."""
    asked = begin.args.parallel
    index, rank = divmod(begin.rank, asked.num_beside)
    at: Meeting = Path(begin.meeting)
    if begin.comm == "network":
        host, _, port = begin.meeting.rpartition(":")
        at = Network(host, int(port), own_host or host)
    device = pick_device(begin.args.device)[0]
    if device.type == "cuda":
        torch.cuda.set_device(number_of(begin.args.device))  # kernels are launched there
    hush, stage = Hush(), Stage()
    if (count := asked.pipeline_parallel_size) > 1:
        ring: Link = GlooRing(named(at, f"-behind-{rank}"), index, count, begin.deadline_s)
        link = HushedLink(HostLink(ring), hush) if device.type == "cuda" else ring
        stage = Stage(index, count, link)
    place = (rank, asked.num_beside)
    if place[1] == 1:
        return Ranks(stage=stage, hush=hush, sharers=begin.sharers)
    meeting, graphed = named(at, f"-beside-{index}"), None
    if begin.comm in GRAPHED:
        comm: Comm = (graphed := _graphed(begin, meeting, place, device, lives))
    else:
        comm = _comm(begin, meeting, place, device, lives)
    if device.type == "cuda":
        comm = HushedComm(comm, hush)
    has_homes, splits = asked.data_parallel_size > 1, asked.tp_reduce == "fast"
    return Ranks(*place, comm, stage, splits, has_homes, hush, begin.sharers, graphed)


def _graphed(
    begin: Begin,
    meeting: Meeting,
    place: tuple[int, int],
    device: torch.device,
    lives: Callable[[], bool],
) -> PeerComm | NcclComm:
    assert isinstance(meeting, Path), f"got {meeting} for ranks of one machine"
    if begin.comm == "peer":
        from quire.dist.peer import PeerComm  # and triton

        return PeerComm(meeting, place, begin.deadline_s, device, lives)
    from quire.dist.nccl import NcclComm  # which torch has on machines with GPUs

    return NcclComm(meeting, place, begin.deadline_s, device, lives)


def _comm(
    begin: Begin,
    meeting: Meeting,
    place: tuple[int, int],
    device: torch.device,
    lives: Callable[[], bool],
) -> Comm:
    """Through memory of the host, as the first rank has chosen."""
    library = find_library().library
    if begin.comm == "shared" and library is not None and isinstance(meeting, Path):
        made: Comm = SharedComm(meeting, place, begin.deadline_s, library, lives)
    else:
        made = GlooComm(meeting, *place, begin.deadline_s)
    return HostComm(made) if device.type == "cuda" else made


@overload
def named(meeting: Path, name: str) -> Path: ...
@overload
def named(meeting: Meeting, name: str) -> Meeting: ...
def named(meeting: Meeting, name: str) -> Meeting:
    """Where some of those who meet there do."""
    if isinstance(meeting, Path):
        return meeting.with_name(meeting.name + name)
    return meeting.of(name)
