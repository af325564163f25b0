"""PoolSizer: how many pages a rank's cache has room for, for the composition root."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.attn.backend import AttentionBackend
from quire.config import Decision, EngineArgs, EngineConfig, SchedConfig
from quire.dist.stages import stage_layers
from quire.engine.device_place import place_bytes
from quire.kv.groups import PageNeeds
from quire.kv.spec import CacheSpec
from quire.memory.sizing import CPU_DEFAULT, Room, cpu_cache_bytes, num_pages, on_each, size_text
from quire.models.decoder import Decoder
from quire.runner.device import free_memory, peak_memory, reset_peak, total_memory
from quire.runner.rows import RequestRows
from quire.runner.warmup import compile_ahead, largest_step


class Runs(NamedTuple):
    """What a step needs besides pages."""

    model: Decoder
    backend: AttentionBackend
    cache: CacheSpec
    rows: RequestRows
    page_bytes: int  # of a page, on the stage that keeps most of it, and for a model that drafts
    apart_bytes: int  # for adapters and the like, that a GPU must keep free


class PoolSizer:
    def __init__(self, args: EngineArgs, config: EngineConfig, runs: Runs) -> None:
        self._args, self._config, self._runs = args, config, runs
        inflight = max_inflight(config.sched, runs.model.device, runs.model.stage.count)
        self._needs = PageNeeds(runs.cache.page_size, runs.cache.groups.windows, inflight)
        self._room: Room | None = None  # once it was measured

    def num_pages(self) -> int:
        """Run the largest step for real, then give the cache what is left. Ranks on GPUs do so one
        by one: nobody else is asked meanwhile."""
        model, sched = self._runs.model, self._config.sched
        with model.ranks.hush.kept():
            room = self._gpu_room() if model.device.type == "cuda" else self._cpu_room()
        self._room = room
        lens = (self._runs.cache.page_size, sched.max_model_len, sched.max_num_seqs)
        return num_pages(room, self._runs.page_bytes, *lens, self._needs)

    def decisions(self, pages: int) -> list[Decision]:
        """`pages`: that there will be; where other ranks have less room, fewer than were found."""
        if self._room is None:
            return []
        cache, size = self._runs.cache, size_text(pages * self._runs.page_bytes)
        each = on_each(self._runs.model.ranks.num_homes)
        value = f"{pages - 1} pages of {cache.page_size} tokens, {size} of {cache.form.name}"
        value += f", {cache.token_bytes:,} bytes a token{each}"
        return [Decision("kv cache", value, self._room.describe())]

    def _gpu_room(self) -> Room:
        model, config = self._runs.model, self._config
        device, total = model.device, total_memory(model.device)
        steps = model, self._runs.backend, self._runs.cache, self._runs.rows
        compile_ahead(*steps, config.sched.max_num_batched_tokens)
        weights = torch.cuda.memory_allocated(device) + self._runs.apart_bytes
        reset_peak(device)
        step = self._step_bytes()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(device)
        held_by_others = total - free_memory(device) - reserved
        usable = int(total * config.gpu_memory_utilization) - held_by_others
        # Ranks on the same GPU have loaded too, or will be the last to look: the least counts.
        usable = weights + (usable - weights) // model.ranks.sharers
        usable -= place_bytes(self._args, device)
        return Room(total, usable, weights, step, config.kv_cache_memory)

    def _cpu_room(self) -> Room:
        # The weights are already gone from what is free. The step is only worth running when
        # memory is short: otherwise the cache is capped far below what is left.
        config, num_ranks = self._config, self._runs.model.ranks.num_processes
        device, page_bytes = self._runs.model.device, self._runs.page_bytes
        one_request = (self._needs.of(config.sched.max_model_len) + 1) * page_bytes
        usable = cpu_cache_bytes(free_memory(device) // num_ranks, one_request)
        is_short = usable < max(CPU_DEFAULT, one_request) and num_ranks == 1
        step = self._step_bytes() if is_short and config.kv_cache_memory is None else 0
        return Room(total_memory(device), usable, 0, step, config.kv_cache_memory)

    def _step_bytes(self) -> int:
        model, backend, cache, rows, _, _ = self._runs
        before = peak_memory(model.device)
        num_tokens = self._config.sched.max_num_batched_tokens
        pool_bytes = largest_step(model, backend, cache, rows, num_tokens)
        return max(0, peak_memory(model.device) - before - pool_bytes)


def largest_share(whole: CacheSpec, num_stages: int) -> int:
    """Bytes of a page on the stage that keeps most of it."""
    stages = stage_layers(whole.groups.num_layers, num_stages)
    return max(whole.of_layers(layers).page_bytes for layers in stages)


def steps_ahead(device: torch.device, num_stages: int = 1) -> int:
    """How many steps are launched before the result of one is looked at; of stages, each has one
    to compute."""
    return num_stages - 1 if num_stages > 1 else int(device.type == "cuda")


def max_inflight(sched: SchedConfig, device: torch.device, num_stages: int = 1) -> int:
    """Tokens of one request in steps launched and not settled."""
    chunk = min(sched.max_chunk or sched.max_num_batched_tokens, sched.max_model_len)
    return (1 + steps_ahead(device, num_stages)) * chunk
