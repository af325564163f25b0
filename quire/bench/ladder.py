"""The ladder: one workload, one model, one cache budget; each rung adds one technique.

Every rung drives the same `ModelRunner` on the same page pool, so what changes from one to the
next is the technique and nothing else, and greedy outputs must stay the same to the last token.
The first rungs are `baselines.py`, the later ones the real scheduler with options switched on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from quire.bench.baselines import CacheUse, ContiguousScheduler, RowLayout
from quire.bench.drive import Run, drive, paged_use
from quire.bench.workload import Job, skewed_jobs, spread
from quire.config import EngineArgs, SchedConfig
from quire.engine.build import Engine, build_engine
from quire.engine.cache_form import cache_wish, plain_form
from quire.engine.core import EngineCore
from quire.kv.groups import PageNeeds, layer_groups
from quire.kv.manager import KVManager
from quire.load.open import open_model
from quire.models.kv_cache import cache_of
from quire.models.registry import spec_of
from quire.resolve import resolve
from quire.runner.runner import ModelRunner
from quire.sched.scheduler import Scheduler

NOT_ON_CPU = "needs a CUDA device"
# A contiguous run of cache for each row cannot replace the tables of several layer groups.
NOT_WITH_GROUPS = "needs one page table for all layers; those of this model see different distances"


@dataclass(frozen=True, slots=True)
class LadderOptions:
    requests: int = 24
    no_cache_requests: int = 2  # the first rung is so slow that a sample must do; 0: all
    max_model_len: int | None = None  # None: 512, or what the model can do
    budget_rows: int = 4  # full-length reservations that the cache has room for
    max_num_seqs: int = 32
    chunk: int = 0  # tokens in a step with chunked prefill; 0: a quarter of max_model_len
    seed: int = 0

    @staticmethod
    def quick() -> LadderOptions:
        return LadderOptions(requests=8, no_cache_requests=2, max_model_len=128)


class Prepared(NamedTuple):
    """A rung ready to run."""

    core: EngineCore
    look: Callable[[], CacheUse]
    scheduler: Scheduler | ContiguousScheduler


class Technique(NamedTuple):
    """What a rung adds, and how to make it run; `prepare` is None where it cannot."""

    name: str
    claimed: str
    prepare: Callable[[], Prepared] | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Rung:
    name: str
    claimed: str  # what the literature promises of it
    run: Run | None  # None: not possible here
    sample: int | None = None  # jobs that were run, when not all
    num_preempted: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class LadderResult:
    rungs: list[Rung]
    jobs: list[Job]
    options: LadderOptions
    page_size: int
    num_pages: int
    slot_bytes: int
    device: str
    dtype: str
    differing: list[str]  # "rung, job, position" of outputs unlike the first rung's


class Ladder:
    """Builds the engine once; `climb` runs the rungs."""

    def __init__(self, args: EngineArgs, options: LadderOptions) -> None:
        self.options = options
        self.engine, self.max_len = _build(args, options)
        self.page_size = args.page_size
        self.num_pages = self.engine.config.cache.num_pages
        self.jobs = skewed_jobs(
            options.requests, self.max_len, self.engine.spec.vocab_size, options.seed
        )
        self.is_cuda = self.engine.config.device == "cuda"

    def climb(self, say: Callable[[str], None] = lambda text: None) -> LadderResult:
        rungs = []
        warm = self._paged()
        drive(warm.core, self.jobs[:1], warm.look)
        for technique in self._techniques():
            name, claimed, prepare, why_not = technique
            if prepare is None:
                say(f"left out: {name}: {why_not}")
                rungs.append(Rung(name, claimed, None, note=why_not))
                continue
            say(f"running: {name}")
            rungs.append(self._run_rung(name, claimed, prepare))
        pool = self.engine.runner.pool.data
        return LadderResult(
            rungs=rungs,
            jobs=self.jobs,
            options=self.options,
            page_size=self.page_size,
            num_pages=self.num_pages - 1,
            slot_bytes=pool.nbytes // (self.num_pages * self.page_size),
            device=self.engine.config.device,
            dtype=self.engine.config.dtype,
            differing=differences(rungs),
        )

    def _techniques(self) -> list[Technique]:
        rows, contiguous, paged = self.options.budget_rows, self._contiguous, self._paged
        before_pages = [
            Technique("no cache", "1x", lambda: contiguous(1, keeps_cache=False)),
            Technique("KV cache", "10-100x", lambda: contiguous(1)),
            Technique("static batch", "2-8x", lambda: contiguous(rows, refills=False)),
            Technique("continuous batch", "2-5x", lambda: contiguous(rows)),
        ]
        if len(self.engine.runner.pool.groups) > 1:
            before_pages = [t._replace(prepare=None, why_not=NOT_WITH_GROUPS) for t in before_pages]
        graphs = Technique(
            "CUDA graphs", "1.1-1.5x", lambda: paged(prefix=True, chunked=True, graphs=True)
        )
        if not self.is_cuda:
            graphs = graphs._replace(prepare=None, why_not=NOT_ON_CPU)
        return [
            *before_pages,
            Technique("paged cache", "~2x more requests fit", lambda: paged()),
            Technique("prefix cache", "depends on workload", lambda: paged(prefix=True)),
            Technique(
                "chunked prefill", "no long stalls", lambda: paged(prefix=True, chunked=True)
            ),
            graphs,
        ]

    def _run_rung(self, name: str, claimed: str, prepare: Callable[[], Prepared]) -> Rung:
        sample = self.options.no_cache_requests if name == "no cache" else 0
        chosen = list(range(len(self.jobs)))
        if 0 < sample < len(chosen):
            chosen = spread(self.jobs, sample)
        jobs = [self.jobs[i] for i in chosen]
        if self.is_cuda:  # kernels compile and graphs are captured on a run nobody counts
            core, look, _ = prepare()
            drive(core, jobs, look)
        core, look, scheduler = prepare()
        run = drive(core, jobs, look)
        run.outputs = {chosen[i]: tokens for i, tokens in run.outputs.items()}
        preempted = scheduler.stats().num_preempted if isinstance(scheduler, Scheduler) else 0
        part = len(chosen) if len(chosen) < len(self.jobs) else None
        return Rung(name, claimed, run, part, preempted)

    def _contiguous(
        self, num_rows: int, *, refills: bool = True, keeps_cache: bool = True
    ) -> Prepared:
        layout = RowLayout(num_rows, -(-self.max_len // self.page_size), self.page_size)
        scheduler = ContiguousScheduler(
            layout, self.max_len, refills=refills, keeps_cache=keeps_cache
        )
        # The core asks a scheduler for has_work, add, schedule and commit only.
        core = EngineCore(cast(Scheduler, scheduler), self.engine.runner, overlap=False)
        return Prepared(core, scheduler.use, scheduler)

    def _paged(
        self, *, prefix: bool = False, chunked: bool = False, graphs: bool = False
    ) -> Prepared:
        # Without chunks a step takes as much as the contiguous batch above could: a whole cache.
        whole = self.max_len * self.options.budget_rows
        budget = (self.options.chunk or self.max_len // 4) if chunked else whole
        config = SchedConfig(
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=max(budget, self.options.max_num_seqs),
            max_model_len=self.max_len,
            chunked_prefill=chunked,
        )
        runner = self.engine.runner
        windows = runner.pool.groups.windows
        sizes, num_homes = (self.num_pages, self.page_size), runner.model.ranks.num_homes
        scheduler = Scheduler(config, KVManager(*sizes, prefix, windows, None, num_homes))
        if graphs:
            runner = ModelRunner(
                runner.model, runner.backend, runner.spec, runner.pool, runner.rows, True
            )
        core = EngineCore(scheduler, runner, overlap=False)
        return Prepared(core, lambda: paged_use(scheduler), scheduler)


def _build(args: EngineArgs, options: LadderOptions) -> tuple[Engine, int]:
    """An engine whose pool holds `budget_rows` full-length requests, each fed whole in one step,
    and not one page more."""
    # Some rungs have a prefix cache. With it on here, latents take the form that suits all rungs.
    args = replace(args, skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=True)
    checkpoint = open_model(args).checkpoint
    spec = spec_of(checkpoint.config)
    max_len = options.max_model_len or args.max_model_len or min(512, spec.max_positions)
    args = replace(args, max_model_len=max_len, max_num_seqs=options.max_num_seqs)
    config, _, dtype = resolve(args, spec)
    groups = layer_groups(spec.windows, spec.num_layers)
    needs = PageNeeds(args.page_size, groups.windows, max_inflight=max_len)
    num_pages = options.budget_rows * needs.of(max_len) + 1
    kept = cache_wish(args, config.cache, checkpoint, spec)
    cache = cache_of(spec, plain_form(dtype), kept, args.page_size)
    memory = num_pages * cache.page_bytes
    return build_engine(replace(args, kv_cache_memory=memory), checkpoint), max_len


def differences(rungs: Sequence[Rung]) -> list[str]:
    """Where a rung's output is not that of the first full rung; empty when all agree."""
    runs = [(rung.name, rung.run.outputs) for rung in rungs if rung.run is not None]
    _, truth = max(runs, key=lambda item: len(item[1]))
    found = []
    for name, outputs in runs:
        for job, tokens in outputs.items():
            if tokens != truth[job]:
                pairs = zip(tokens, truth[job], strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
                found.append(f"{name}: job {job} from token {at}")
    return found
