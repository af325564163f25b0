"""Which device each rank of a machine computes on, and how ranks on these devices talk. No torch.

One GPU each, as "cuda" says: the first rank on the first one that its process sees, the next on the
next. A list, as "cuda:0,cuda:0", names them one by one. The way to talk is chosen here and nowhere
else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

from quire.errors import NotSupported

_NAMED = re.compile(r"cuda:(\d+)")
GRAPHED = ("peer", "nccl")  # what goes these ways can be part of CUDA graphs


class Carrier(NamedTuple):
    """How ranks side by side bring their parts together."""

    name: str  # "peer", "nccl"; or "shared" memory, "gloo" or "network", of the host if on GPUs
    why: str


def is_device(name: str) -> bool:
    """
    >>> is_device("cuda"), is_device("cuda:0,cuda:1"), is_device("cuda:x")
    (True, True, False)
    """
    is_list = all(_NAMED.fullmatch(one) for one in name.split(","))
    return name in ("auto", "cpu", "cuda") or is_list


def places_of(asked: str, num_ranks: int, num_seen: int) -> tuple[str, ...]:
    """The device of each rank. `asked`: what `is_device` takes, of GPUs; `num_seen`: how many there
    are.

    >>> places_of("cuda", 2, 4), places_of("cuda:0,cuda:0", 2, 1)
    (('cuda:0', 'cuda:1'), ('cuda:0', 'cuda:0'))
    """
    if asked in ("auto", "cuda"):
        places = tuple(f"cuda:{rank}" for rank in range(num_ranks))
        if num_ranks > num_seen:
            shared = ",".join(["cuda:0"] * num_ranks)
            raise NotSupported(
                f"got {num_ranks} ranks on device={asked!r} and {num_seen} GPUs, want a GPU for"
                f" each; use fewer ranks, or device='{shared}' to let them share one"
            )
        return places
    places = tuple(asked.split(","))
    if len(places) != num_ranks:
        raise NotSupported(
            f"got device={asked!r} for {num_ranks} ranks, want a device for each of them, or"
            " device='cuda'"
        )
    absent = [place for place in places if number_of(place) >= num_seen]
    if absent:
        raise NotSupported(f"got device={asked!r}: {absent[0]} is not there, of {num_seen} GPUs")
    if number_of(places[0]) != 0:
        raise NotSupported(
            f"got device={asked!r}, want cuda:0 for the first rank, which computes on the first GPU"
            f" that its process sees: set CUDA_VISIBLE_DEVICES={number_of(places[0])} to begin"
            " with another one"
        )
    return places


def number_of(place: str) -> int:
    found = _NAMED.fullmatch(place)
    return 0 if found is None else int(found[1])


def carrier_of(
    places: tuple[str, ...],
    num_beside: int,
    on_host: str,
    maps: Callable[[str, str], bool] = lambda one, other: False,
) -> Carrier:
    """`places`: a GPU for each rank, none where they are on CPUs; `num_beside` neighbours share the
    layers of a stage. `on_host`: how processes talk through memory of the host. `maps`: whether
    processes on these GPUs, or on this one, can map each other's memory.

    >>> carrier_of(("cuda:0", "cuda:1"), 2, "shared").name, carrier_of((), 2, "shared").name
    ('nccl', 'shared')
    """
    if not places:
        return Carrier(on_host, "ranks are on CPUs")
    if num_beside == 1:
        return Carrier(on_host, "stages alone, a message for each step")
    groups = [places[first : first + num_beside] for first in range(0, len(places), num_beside)]
    pairs = {pair for beside in groups for pair in combinations(beside, 2)}
    apart = sorted(pair for pair in pairs if not maps(*pair))
    if not apart:
        return Carrier("peer", "ranks map each other's memory")
    shared = sorted(one for one, other in pairs if one == other)
    if shared:
        why = f"several ranks are on {shared[0]}, which NCCL refuses"
        return Carrier(on_host, f"{why}, and memory of {' and '.join(apart[0])} cannot be mapped")
    why = f"a GPU for each rank, and {' and '.join(apart[0])} cannot map each other's memory"
    return Carrier("nccl", why)
