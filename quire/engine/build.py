"""build: the composition root. The only file that knows all classes.

Order matters for memory: weights first, then the largest step on a small pool to see what
activations need, then the real pool from what is left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.attn.backend import AttentionBackend, AttnSpec
from quire.attn.select import select_backend
from quire.config import Decision, EngineArgs, EngineConfig, SchedConfig
from quire.engine.core import EngineCore
from quire.engine.cpu_path import CpuPath
from quire.engine.load_model import load_model
from quire.engine.speculate import SpecParts
from quire.errors import NotSupported
from quire.grammar.matcher import GrammarCompiler
from quire.grammar.pending import GrammarQueue
from quire.kv.groups import LayerGroups, PageNeeds, layer_groups
from quire.kv.manager import KVManager
from quire.load.checkpoint import Checkpoint
from quire.load.fit import check_fit
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.load.wish import Wish
from quire.memory.pool import PagePool, bytes_per_page
from quire.memory.sizing import (
    CPU_DEFAULT,
    Room,
    check_weights_fit,
    cpu_cache_bytes,
    num_pages,
    size_text,
)
from quire.models.decoder import Decoder, heads_of
from quire.models.registry import spec_of
from quire.models.spec import ModelSpec
from quire.ops.select import ops_of
from quire.quant.methods import method_of, stored_method
from quire.quant.rtn import RtnForm
from quire.resolve import resolve
from quire.runner.device import free_memory, peak_memory, reset_peak, total_memory
from quire.runner.rows import RequestRows
from quire.runner.runner import ModelRunner
from quire.runner.warmup import compile_ahead, largest_step
from quire.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Engine:
    """What was built, and every decision on the way."""

    core: EngineCore
    runner: ModelRunner
    config: EngineConfig
    spec: ModelSpec

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.config.decisions


def build_engine(
    args: EngineArgs, checkpoint: Checkpoint, tokenizer: Tokenizer | None = None
) -> Engine:
    """The tokenizer is for grammars alone; without one, requests with a grammar are refused."""
    spec = spec_of(checkpoint.config)
    check_fit(checkpoint, spec, tokenizer)
    config, device, dtype = resolve(args, spec)
    cpu = CpuPath.of(args, device)
    # While packed weights are laid out, each is a byte.
    is_packed = cpu.keeps_packed and isinstance(checkpoint, GGUFCheckpoint)
    itemsize = 1 if is_packed else dtype.itemsize
    check_weights_fit(spec.num_params * itemsize, total_memory(device))
    heads = heads_of(spec, args.page_size)
    groups = layer_groups(spec.windows, spec.num_layers)
    name, backend = select_backend(config.attention_backend, device, dtype, heads)
    ops = ops_of(device, cpu.library if dtype == torch.float32 else None)
    wish = Wish(cpu.keeps_packed, _form(args, checkpoint, device))
    model = load_model(checkpoint, spec, heads, config, ops, wish, dtype, device)
    backend = cpu.attention(backend, ops)
    parts = SpecParts.open(args, spec, config, cpu)
    max_pages = -(-config.sched.max_model_len // args.page_size)
    rows = RequestRows(
        config.sched.max_num_seqs, config.sched.max_model_len, max_pages, device, len(groups)
    )
    decisions = [
        *config.decisions,
        Decision("attention", name, f"first that can do {dtype} on {device.type}"),
        *cpu.decisions(ops),
    ]
    if len(groups) > 1 or groups.windows != (None,):
        decisions.append(_describe(groups))
    runs = Runs(model, backend, heads, rows)
    pages = _size_pool(config, runs, parts.page_bytes, decisions)
    pool = PagePool(backend, heads, groups, pages, backend.cache_dtype, device)
    use_graphs = backend.caps.graphs and device.type == "cuda" and not config.enforce_eager
    # Pages of generated tokens would differ from those of the same tokens in a prompt.
    expand_prompts = spec.mla is not None and not config.cache.prefix_caching
    runner = ModelRunner(model, backend, heads, pool, rows, use_graphs, expand_prompts)
    runner.tapes = cpu.record(model, backend, pool, config, decisions)
    drafts = parts.finish(runner, config, decisions)
    kv = KVManager(pages, args.page_size, config.cache.prefix_caching, groups.windows)
    scheduler = Scheduler(config.sched, kv)
    grammars = _grammars(tokenizer, spec, runner)
    core = EngineCore(scheduler, runner, device.type == "cuda", grammars, drafts)
    config = replace(
        config, cache=replace(config.cache, num_pages=pages), decisions=tuple(decisions)
    )
    return Engine(core, runner, config, spec)


def _form(args: EngineArgs, checkpoint: Checkpoint, device: torch.device) -> RtnForm | None:
    """What weights are rounded to; the word for a form they are stored in asks for nothing."""
    if args.quantization is None:
        return None
    if (asked := stored_method(args.quantization)) is not None:
        is_gguf = isinstance(checkpoint, GGUFCheckpoint)
        method = "gguf" if is_gguf else method_of(checkpoint.config)
        if asked != method:
            raise NotSupported(
                f"got quantization={args.quantization!r}, the weights are stored as"
                f" {method or 'plain numbers'}; leave it out"
            )
        return None
    if device.type != "cpu":
        raise NotSupported(
            f"got quantization={args.quantization!r} on {device.type}: weights are rounded at load"
            " on CPUs only so far; leave it out"
        )
    return RtnForm.parse(args.quantization)


def _describe(groups: LayerGroups) -> Decision:
    counts = Counter(groups.windows)
    kinds = [
        f"{count} " + ("full" if window is None else f"of window {window}")
        for window, count in counts.items()
    ]
    unused = len(groups) * groups.num_places - groups.num_layers
    why = f"{groups.num_layers} layers, {groups.num_places} a group, {unused} places unused"
    return Decision("layer groups", ", ".join(kinds), why)


def max_inflight(sched: SchedConfig, device: torch.device) -> int:
    """Tokens of one request in steps launched and not settled: on CUDA there may be two."""
    chunk = min(sched.max_chunk or sched.max_num_batched_tokens, sched.max_model_len)
    return 2 * chunk if device.type == "cuda" else chunk


def _grammars(
    tokenizer: Tokenizer | None, spec: ModelSpec, runner: ModelRunner
) -> GrammarQueue | None:
    if tokenizer is None:
        return None
    compiler = GrammarCompiler(tokenizer.to_json, spec.vocab_size, tokenizer.eos_ids)
    return GrammarQueue(compiler, runner.matchers)


class Runs(NamedTuple):
    """What a step needs besides pages."""

    model: Decoder
    backend: AttentionBackend
    heads: AttnSpec
    rows: RequestRows


def _size_pool(
    config: EngineConfig, runs: Runs, draft_bytes: int, decisions: list[Decision]
) -> int:
    """Run the largest step for real, then give the cache what is left.

    A page holds `draft_bytes` of another model, which drafts, as well."""
    model, backend, heads, rows = runs
    device, spec, sched = model.device, model.spec, config.sched
    groups = layer_groups(spec.windows, spec.num_layers)
    needs = PageNeeds(heads.page_size, groups.windows, max_inflight(sched, device))
    page_bytes = bytes_per_page(heads, groups.num_places, backend.cache_dtype) + draft_bytes

    def step_bytes() -> int:
        before = peak_memory(device)
        pool_bytes = largest_step(model, backend, heads, rows, sched.max_num_batched_tokens)
        return max(0, peak_memory(device) - before - pool_bytes)

    if device.type == "cuda":
        compile_ahead(model, backend, heads, rows, sched.max_num_batched_tokens)
        weights = torch.cuda.memory_allocated(device)
        reset_peak(device)
        step = step_bytes()
        torch.cuda.empty_cache()
        held_by_others = total_memory(device) - free_memory(device) - torch.cuda.memory_reserved()
        usable = int(total_memory(device) * config.gpu_memory_utilization) - held_by_others
    else:
        # The weights are already gone from what is free. The step is only worth running when
        # memory is short: otherwise the cache is capped far below what is left.
        weights, free = 0, free_memory(device)
        one_request = (needs.of(sched.max_model_len) + 1) * page_bytes
        usable = cpu_cache_bytes(free, one_request)
        is_short = usable < max(CPU_DEFAULT, one_request)
        step = step_bytes() if is_short and config.kv_cache_memory is None else 0
    room = Room(total_memory(device), usable, weights, step, config.kv_cache_memory)
    lens = (heads.page_size, sched.max_model_len, sched.max_num_seqs)
    pages = num_pages(room, page_bytes, *lens, needs)
    decisions.append(
        Decision(
            "kv cache",
            f"{pages - 1} pages of {heads.page_size} tokens, {size_text(pages * page_bytes)}"
            f" of {str(backend.cache_dtype).removeprefix('torch.')}",
            room.describe(),
        )
    )
    return pages
