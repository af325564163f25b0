"""Pages that would fit, on one rank or on several, before any weight is loaded.

An estimate: the real count comes after the weights are in and, on a GPU, after the largest step has
run (`engine/pool_size.py`). The weights of a rank are counted in tensors without memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.config import Decision, EngineArgs, EngineConfig
from quire.dist.devices import GRAPHED
from quire.dist.ranks import Ranks
from quire.dist.stages import Stage
from quire.engine.pool_size import largest_share, max_inflight
from quire.engine.rank_graphs import steps_decision, why_by_kernels
from quire.engine.rank_places import (
    carrier_between,
    host_carrier,
    rank_decisions,
    rank_places,
)
from quire.errors import OutOfMemory
from quire.kv.forms import CacheForm
from quire.kv.groups import PageNeeds, layer_groups
from quire.memory.sizing import Room, cpu_cache_bytes, num_pages, on_each, size_text
from quire.models.decoder import Decoder, heads_of, spec_of_rank
from quire.models.kv_cache import CacheWish, cache_of
from quire.models.spec import ModelSpec
from quire.runner.device import free_memory, total_memory


class Wanted(NamedTuple):
    """What an engine would be made of."""

    args: EngineArgs
    config: EngineConfig
    spec: ModelSpec
    device: torch.device
    plain: CacheForm
    coded: CacheWish

    def needs(self) -> PageNeeds:
        windows = layer_groups(self.spec.windows, self.spec.num_layers).windows
        num_stages = self.args.parallel.pipeline_parallel_size
        inflight = max_inflight(self.config.sched, self.device, num_stages)
        return PageNeeds(self.config.cache.page_size, windows, inflight)

    def page_bytes(self) -> int:
        """Of a page, on the rank that keeps most of it."""
        num_stages = self.args.parallel.pipeline_parallel_size
        own = spec_of_rank(self.spec, everybody(self.args)[0])
        sizes = self.coded, self.config.cache.page_size
        return largest_share(cache_of(own, self.plain, *sizes, num_stages > 1), num_stages)


def everybody(args: EngineArgs) -> list[Ranks]:
    """The part of each rank; they cannot hear each other."""
    asked, size = args.parallel, args.parallel.num_beside
    splits, has_homes = asked.tp_reduce == "fast", asked.data_parallel_size > 1
    stages = [Stage(i, asked.pipeline_parallel_size) for i in range(asked.pipeline_parallel_size)]
    return [
        Ranks(rank, size, stage=stage, splits_sums=splits, has_homes=has_homes)
        for stage in stages
        for rank in range(size)
    ]


def room_decisions(wanted: Wanted, weights: int) -> list[Decision]:
    """`weights`: bytes of all of the model's."""
    args = wanted.args
    if args.parallel.num_ranks == 1:
        return [_pages(wanted, _room(wanted, weights))]
    gpus, held = rank_places(args), held_by_each(wanted, weights)
    carrier = carrier_between(args, gpus, host_carrier(args.parallel))
    sizes = [size_text(size) for size in (min(held), max(held))]
    about = sizes[0] if sizes[0] == sizes[1] else " to ".join(sizes)
    why = f"{size_text(sum(held))} together, {args.parallel}"
    made = [*rank_decisions(args.parallel, gpus, carrier)]
    made.append(Decision("weights of a rank", f"about {about}", why))
    if not gpus:
        room = _room(wanted, sum(held), args.parallel.num_ranks // args.parallel.nnodes)
        return [*made, _pages(wanted, room)]
    first, is_eager = everybody(args)[0], wanted.config.enforce_eager
    by_kernels = why_by_kernels(first, wanted.spec, is_eager, carrier.name in GRAPHED)
    made.append(steps_decision(by_kernels))
    on_gpus = {
        gpu: [size for at, size in zip(gpus, held, strict=True) if at == gpu] for gpu in gpus
    }
    rooms = [_room(wanted, sum(on), len(on), torch.device(gpu)) for gpu, on in on_gpus.items()]
    return [*made, _pages(wanted, min(rooms, key=lambda room: room.cache))]


def held_by_each(wanted: Wanted, weights: int) -> list[int]:
    """Bytes of weights on each rank, as many of all as there are numbers."""
    spec, device = wanted.spec, torch.device("meta")

    def count(ranks: Ranks) -> int:
        own = heads_of(spec_of_rank(spec, ranks), wanted.config.cache.page_size)
        model = Decoder(spec, own, spec.max_positions, torch.float32, device, ranks)
        return sum(parameter.num_elements for parameter in model.parameters().values())

    whole = count(Ranks())
    return [weights * count(ranks) // whole for ranks in everybody(wanted.args)]


def _room(
    wanted: Wanted, weights: int, num_sharers: int = 1, device: torch.device | None = None
) -> Room:
    """What one of the ranks that share a device has, whose weights are these together."""
    config, device = wanted.config, device or wanted.device
    free, total = free_memory(device), total_memory(device)
    if device.type == "cuda":
        usable = int(total * config.gpu_memory_utilization) - (total - free)
        own = weights // num_sharers
        return Room(total, usable // num_sharers, own, 0, config.kv_cache_memory)
    one_request = (wanted.needs().of(config.sched.max_model_len) + 1) * wanted.page_bytes()
    usable = cpu_cache_bytes((free - weights) // num_sharers, one_request)
    return Room(total, usable, 0, 0, config.kv_cache_memory)


def _pages(wanted: Wanted, room: Room) -> Decision:
    size, sched, parallel = wanted.config.cache.page_size, wanted.config.sched, wanted.args.parallel
    needs, page_bytes = wanted.needs(), wanted.page_bytes()
    lens = (size, sched.max_model_len, sched.max_num_seqs)
    try:
        pages = num_pages(room, page_bytes, *lens, needs) - 1
    except OutOfMemory as error:
        return Decision("kv cache", "does not fit", str(error))
    value = f"about {pages} pages of {size}"
    if len(needs.windows) == 1:
        value += f" = {pages * size} tokens"
    if parallel.num_ranks > 1:
        value += f", {size_text(pages * page_bytes)} of a rank"
    return Decision("kv cache", value + on_each(parallel.data_parallel_size), room.describe())
