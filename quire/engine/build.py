"""build: the composition root. The only file that knows all classes.

Order matters for memory: weights first, then the largest step on a small pool to see what
activations need, then the real pool from what is left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from quire.attn.backend import AttentionBackend, AttnSpec
from quire.attn.proof import proved_backend
from quire.config import Decision, EngineArgs, EngineConfig, SchedConfig
from quire.dist.ranks import Ranks
from quire.engine.adapted import adapter_bytes, open_adapters
from quire.engine.cache_form import (
    balance_keys,
    cache_decisions,
    cache_wish,
    plain_form,
    share_queries,
    splits_queries,
)
from quire.engine.copies import open_copies
from quire.engine.core import EngineCore
from quire.engine.cpu_path import CpuPath
from quire.engine.gpu_weights import gpu_weight_decisions, keeps_packed_on
from quire.engine.load_model import load_model
from quire.engine.parking import Parking, offer_of
from quire.engine.pool_size import PoolSizer, Runs, largest_share, steps_ahead
from quire.engine.rank_graphs import steps_decision, why_by_kernels
from quire.engine.seat import Seat, seat_of
from quire.engine.speculate import SpecParts
from quire.engine.tier_identity import PageMakers
from quire.engine.tier_parts import connect_tiers
from quire.engine.whole_ends import TargetModel, whole_ends
from quire.errors import NotSupported
from quire.grammar.matcher import GrammarCompiler
from quire.grammar.pending import GrammarQueue
from quire.kv.groups import LayerGroups
from quire.kv.manager import KVManager
from quire.kv.spec import CacheSpec
from quire.load.checkpoint import Checkpoint
from quire.load.fit import check_fit
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.load.open import open_model
from quire.load.wish import Wish
from quire.memory.pool import PagePool
from quire.memory.sizing import check_weights_fit
from quire.models.decoder import Decoder, heads_of, spec_of_rank
from quire.models.kv_cache import CacheWish, cache_of
from quire.models.registry import names_of, spec_of
from quire.models.spec import ModelSpec
from quire.nn.ops import Ops
from quire.quant.form_name import is_form
from quire.quant.load_forms import LoadForm, load_form
from quire.quant.methods import method_of, stored_method
from quire.resolve import resolve
from quire.runner.chunk_times import chunk_times
from quire.runner.device import total_memory
from quire.runner.rows import RequestRows
from quire.runner.runner import ModelRunner
from quire.sched.costs import StepCosts
from quire.sched.gap import prompt_budget
from quire.sched.scheduler import Scheduler
from quire.spec.jumps import Jumps
from quire.tiers.tiers import Tiers

if TYPE_CHECKING:
    from quire.engine.rank_group import RankGroup
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Engine:
    """What was built, and every decision on the way."""

    core: EngineCore
    runner: ModelRunner
    config: EngineConfig
    spec: ModelSpec
    group: RankGroup | None = None  # other processes that hold parts of the model
    tiers: Tiers | None = None
    parking: Parking | None = None  # where it can leave its GPU's memory

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.config.decisions


def build_engine(
    args: EngineArgs,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None = None,  # for grammars alone; without one they are refused
    seat: Seat | None = None,  # among other processes; None: a new one, as the arguments say
    parks: bool = False,  # it shall be able to leave its GPU's memory
) -> Engine:
    """Raises QuireError with what cannot be had as it was asked for."""
    spec = spec_of(checkpoint.config)
    check_fit(checkpoint, spec, tokenizer)
    config, device, dtype = resolve(args, spec)
    seat = seat or seat_of(args)
    args, ranks = seat.args, seat.ranks
    own, cpu = spec_of_rank(spec, ranks), CpuPath.of(args, device)
    _check_memory(args, checkpoint, spec, cpu, device, dtype)
    heads, kept = heads_of(own, args.page_size), cache_wish(args, config.cache, checkpoint, spec)
    name, backend = proved_backend(config.attention_backend, device, dtype, heads, kept.coded)
    cpu, wish = _wish(args, checkpoint, device, cpu)
    with (offer := offer_of(parks, args, device)).weights():
        source = checkpoint, spec, heads, config
        model, ops = load_model(*source, cpu, wish, dtype, device, ranks=ranks)
        backend = cpu.attention(backend, ops)
        whole = _whole_cache(own, backend, kept, args.page_size, ranks)
        balance_keys(model, cache := whole.of_layers(model.layers))
        parts = SpecParts.open(args, TargetModel(model, checkpoint, wish, tokenizer), config, cpu)
    rows = _rows(config.sched, cache, device)
    decisions = _first_decisions(config, name, cpu, ops, cache, seat)
    share = largest_share(whole, ranks.stage.count) + parts.page_bytes
    apart = adapter_bytes(args) + offer.spare
    sizer = PoolSizer(args, config, Runs(model, backend, cache, rows, share, apart))
    pages = seat.num_pages(sizer.num_pages)
    _agree_on_queries(seat, model, cache)
    decisions += sizer.decisions(pages)
    pool = PagePool(backend, heads, cache, pages, device, offer.pages)
    runner = _runner(seat, config, model, backend, heads, pool, rows, decisions)
    runner.tapes = cpu.record(model, backend, pool, config, decisions, parts.taps)
    grammars = _grammars(tokenizer, spec, runner)
    drafts = parts.finish(runner, config, decisions) or _jumps(grammars, runner)
    makers = PageMakers(checkpoint, spec, config, wish, ops, backend, cache, ranks)
    kept_apart = seat.open_tiers(makers, runner, decisions)
    kv = _kv_manager(config, cache, pages, kept_apart.secret, ranks.num_homes)
    scheduler = _scheduler(config, kv, runner, decisions)
    names, lag = names_of(checkpoint.config, spec), steps_ahead(device, ranks.stage.count)
    adapters = open_adapters(args, config.sched, runner, names, decisions, seat.group)
    runner.balancer = open_copies(args, model, checkpoint, names, wish, cpu)
    core = EngineCore(scheduler, runner, lag, grammars, drafts, adapters)
    connect_tiers(kept_apart, core, runner)
    parking = offer.taken(core, decisions)
    config = _settled(config, pages, whole, decisions)
    return Engine(core, runner, config, spec, seat.group, kept_apart.tiers, parking)


def _agree_on_queries(seat: Seat, model: Decoder, cache: CacheSpec) -> None:
    """Ranks that share a key head even it out by the queries of all of them."""
    if seat.group is not None and splits_queries(model, cache):
        seat.group.share_queries()
        share_queries(model, cache)


def _runner(
    seat: Seat,
    config: EngineConfig,
    model: Decoder,
    backend: AttentionBackend,
    heads: AttnSpec,
    pool: PagePool,
    rows: RequestRows,
    decisions: list[Decision],
) -> ModelRunner:
    captures = model.device.type == "cuda" and backend.caps.graphs and not config.enforce_eager
    if model.device.type == "cuda" and model.ranks.num_processes > 1:
        graphed = model.ranks.graphed is not None
        why = why_by_kernels(model.ranks, model.spec, config.enforce_eager, graphed)
        if not backend.caps.graphs:
            why = why or "no graph can hold what attention does here"
        captures = captures and why is None
        decisions.append(steps_decision(why))
    # Pages of generated tokens would differ from those of the same tokens in a prompt.
    expand_prompts = model.spec.mla is not None and not config.cache.prefix_caching
    return seat.runner(model, backend, heads, pool, rows, captures, expand_prompts)


def _kv_manager(
    config: EngineConfig, cache: CacheSpec, pages: int, secret: bytes | None, num_homes: int
) -> KVManager:
    caching, windows = config.cache.prefix_caching, cache.groups.windows
    return KVManager(pages, cache.page_size, caching, windows, secret, num_homes)


def _settled(
    config: EngineConfig, pages: int, whole: CacheSpec, decisions: list[Decision]
) -> EngineConfig:
    sized = replace(config.cache, num_pages=pages, token_bytes=whole.token_bytes)
    return replace(config, cache=sized, decisions=tuple(decisions))


def _whole_cache(
    spec: ModelSpec, backend: AttentionBackend, kept: CacheWish, page_size: int, ranks: Ranks
) -> CacheSpec:
    """Of all stages."""
    plain = plain_form(backend.cache_dtype)
    return cache_of(spec, plain, kept, page_size, is_staged=not ranks.stage.is_only)


def _first_decisions(
    config: EngineConfig, attention: str, cpu: CpuPath, ops: Ops, cache: CacheSpec, seat: Seat
) -> list[Decision]:
    """Those that are made before pages are counted."""
    about_ranks = [] if seat.group is None else seat.group.decisions
    why = f"first that can do {config.dtype} on {config.device}"
    weights = [*cpu.decisions(ops), *gpu_weight_decisions(ops, config.device)]
    about_cache = [*cache_decisions(cache), *_group_decisions(cache.groups)]
    made = [*config.decisions, *about_ranks, Decision("attention", attention, why)]
    return [*made, *weights, *about_cache]


def _wish(
    args: EngineArgs, checkpoint: Checkpoint, device: torch.device, cpu: CpuPath
) -> tuple[CpuPath, Wish]:
    form = asked_form(args, checkpoint, device)
    if form is not None:
        cpu = cpu.rounding_to(str(args.quantization))
    elif isinstance(checkpoint, GGUFCheckpoint) or method_of(checkpoint.config) is not None:
        cpu = cpu.of_packed_files()
    return cpu, Wish(cpu.keeps_packed or keeps_packed_on(device, args, checkpoint), form)


def ends_of(args: EngineArgs, model: Decoder) -> Decoder:
    """Embedding and output of an engine's model, whole; read once more where ranks have parts."""
    if model.ranks.num_processes == 1:
        return model
    args = replace(args, num_threads=torch.get_num_threads())  # as they are
    checkpoint, cpu = open_model(args).checkpoint, CpuPath.of(args, model.device)
    cpu, wish = _wish(args, checkpoint, model.device, cpu)
    with torch.inference_mode():
        return whole_ends(args, TargetModel(model, checkpoint, wish, None), cpu)


def _rows(sched: SchedConfig, cache: CacheSpec, device: torch.device) -> RequestRows:
    max_pages = -(-sched.max_model_len // cache.page_size)
    return RequestRows(
        sched.max_num_seqs, sched.max_model_len, max_pages, device, len(cache.groups)
    )


def _keeps_as_stored(
    args: EngineArgs, checkpoint: Checkpoint, device: torch.device, cpu: CpuPath
) -> bool:
    is_gguf = isinstance(checkpoint, GGUFCheckpoint)
    return keeps_packed_on(device, args, checkpoint) or (cpu.keeps_packed and is_gguf)


def _check_memory(
    args: EngineArgs,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    cpu: CpuPath,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    if _keeps_as_stored(args, checkpoint, device, cpu):
        num_bytes = sum(checkpoint.stored(name).num_bytes for name in checkpoint.names())
    else:
        num_bytes = spec.num_params * dtype.itemsize
    check_weights_fit(num_bytes, total_memory(device))


def _scheduler(
    config: EngineConfig, kv: KVManager, runner: ModelRunner, decisions: list[Decision]
) -> Scheduler:
    made = Scheduler(config.sched, kv, costs=_step_costs(config.sched, runner, decisions))
    runner.is_timed = made.costs is not None and runner.model.device.type == "cuda"
    return made


def _step_costs(
    sched: SchedConfig, runner: ModelRunner, decisions: list[Decision]
) -> StepCosts | None:
    """What steps take here, measured where somebody asks for a gap between tokens."""
    if not sched.target_gap_ms:
        return None
    costs = chunk_times(runner, sched.max_num_batched_tokens)
    target_s = sched.target_gap_ms / 1e3
    fit = prompt_budget(sched.max_num_batched_tokens, 1, costs, target_s)
    why = f"{fit} prompt tokens beside one that decodes; one alone takes {costs.times[0] * 1e3:.1f}"
    decisions.append(Decision("target gap", f"{sched.target_gap_ms:g} ms", f"{why} ms here"))
    return costs


def asked_form(args: EngineArgs, checkpoint: Checkpoint, device: torch.device) -> LoadForm | None:
    """What weights are rounded to; the word for a form they are stored in asks for nothing."""
    name = args.quantization
    if name is None:
        return None
    stored = "gguf" if isinstance(checkpoint, GGUFCheckpoint) else method_of(checkpoint.config)
    if stored is not None and stored_method(name) == stored:
        return None
    if not is_form(name):
        raise NotSupported(
            f"got quantization={name!r}, the weights are stored as {stored or 'plain numbers'};"
            " leave it out"
        )
    return load_form(name, device.type == "cuda")


def _group_decisions(groups: LayerGroups) -> list[Decision]:
    """Nothing to say where all layers see everything."""
    if groups.windows == (None,):
        return []
    counts = Counter(groups.windows)
    kinds = [
        f"{count} " + ("full" if window is None else f"of window {window}")
        for window, count in counts.items()
    ]
    unused = len(groups) * groups.num_places - groups.num_layers
    why = f"{groups.num_layers} layers, {groups.num_places} a group, {unused} places unused"
    return [Decision("layer groups", ", ".join(kinds), why)]


def _jumps(grammars: GrammarQueue | None, runner: ModelRunner) -> Jumps | None:
    """Who drafts where no method does; other ranks hear of it with the step, as of any drafts."""
    return None if grammars is None else Jumps(runner.masks)


def _grammars(
    tokenizer: Tokenizer | None, spec: ModelSpec, runner: ModelRunner
) -> GrammarQueue | None:
    if tokenizer is None:
        return None
    compiler = GrammarCompiler(tokenizer.to_json, spec.vocab_size, tokenizer.eos_ids)
    return GrammarQueue(compiler, runner.matchers)
