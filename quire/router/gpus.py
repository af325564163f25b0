"""Which GPUs each of several servers on this machine sees: neighbours of those we see. No torch.

A process sees what CUDA_VISIBLE_DEVICES lists, or all GPUs of the machine; a list that names one
twice lets two servers share it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from quire import env
from quire.config import EngineArgs
from quire.dist.devices import number_of
from quire.errors import NotSupported

DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU
NODES, NODE = Path("/dev"), re.compile(r"nvidia\d+")


def gpu_shares(count: int, engines: Sequence[EngineArgs]) -> tuple[tuple[str, ...], ...]:
    """For each of `count` servers, which have these engines each, the GPUs that it shall see; ()
    where it shall see what we see. Raises NotSupported where there are too few."""
    each = max(map(gpus_of, engines))
    if count == 1 or each == 0:
        return ((),) * count
    seen = seen_gpus()
    if not seen and all(args.device in ("auto", "cpu") for args in engines):
        return ((),) * count
    if len(seen) < count * each:
        raise NotSupported(
            f"got {count} replicas of {each} GPUs each and found {len(seen)} GPUs"
            f" ({', '.join(seen) or 'none'}); use fewer replicas, device='cpu', or name all GPUs in"
            " CUDA_VISIBLE_DEVICES, where one that is listed for two replicas (0,0) is shared by"
            " them: give each --gpu-memory-utilization 0.45 then"
        )
    shares = tuple(seen[first : first + each] for first in range(0, count * each, each))
    for number, share in enumerate(shares):
        if len(set(share)) < each:
            raise NotSupported(
                f"got CUDA_VISIBLE_DEVICES={','.join(seen)}, of which replica {number} has"
                f" {','.join(share)}, want {each} different GPUs for each; ranks that share one are"
                " named by device='cuda:0,cuda:0'"
            )
    return shares


def gpus_of(args: EngineArgs) -> int:
    """How many an engine must see: one for each rank here, or up to the last of a list.

    >>> gpus_of(EngineArgs(device="cuda:0,cuda:0")), gpus_of(EngineArgs(device="cuda:0,cuda:1"))
    (1, 2)
    """
    if args.device == "cpu":
        return 0
    if args.device in ("auto", "cuda"):
        return args.parallel.num_ranks // args.parallel.nnodes
    return 1 + max(number_of(place) for place in args.device.split(","))


def seen_gpus() -> tuple[str, ...]:
    """Names of the GPUs that a process sees which is started here, in its order."""
    listed = env.visible_gpus()
    if listed is None:
        return tuple(str(number) for number in range(_count()))
    names = [name.strip() for name in listed.split(",")]
    ends = [i for i, name in enumerate(names) if name in ("", "-1")]  # the list ends there
    return tuple(names[: ends[0]] if ends else names)


def _count() -> int:
    """Those of the driver; of nodes that a container was given where it does not see the driver.
    Elsewhere, as in WSL, there seem to be none, and CUDA_VISIBLE_DEVICES says how many there are.
    """
    if DRIVER.is_dir():
        return sum(1 for _ in DRIVER.iterdir())
    return sum(NODE.fullmatch(path.name) is not None for path in NODES.glob("nvidia*"))
