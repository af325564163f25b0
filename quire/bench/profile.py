"""Profile: where the time of a decode step or of a prefill goes, kernel by kernel.

Steps are timed twice, once undisturbed and once under torch's profiler, which also sees the kernels
inside a replayed graph. Each kind of work is shown with what `roofline.py` says it must move and
compute. Time in which no kernel ran has its own line. On a CPU the lines are operators, and the
rest is Python. `kernel_times.py` does the sums.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from quire.bench.kernel_times import Share, Slice, Span, by_name, is_work, own_times, shares
from quire.bench.offline import greedy, vocab_size
from quire.bench.peers import H200
from quire.bench.roofline import PRODUCTS, Ceilings, Feed, Load, step_loads, total
from quire.errors import BadRequest, NotSupported
from quire.llm import LLM
from quire.native.library import find_library
from quire.request import Request, RequestId

WARM_STEPS = 4
PROBE_BYTES, PROBE_SIDE = 1 << 28, 1024  # for the ceilings of an unknown device


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    batches: tuple[int, ...] = (1, 32, 256)  # of decode steps
    prefills: tuple[int, ...] = ()  # lengths of lone prompts
    context: int = 256  # tokens each decoding request has before the measured steps
    steps: int = 32


class Line(NamedTuple):
    """One kind of work of a step. Times in microseconds; `floor` is the least it can take."""

    kind: str
    launches: float
    micros: float
    share: float
    num_bytes: float
    floor: float
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepProfile:
    what: str
    step_us: float  # undisturbed
    profiled_us: float
    lines: list[Line]
    idle_us: float  # no kernel ran; on a CPU no operator, so Python did
    floor_us: float  # the whole step at the device's ceilings
    kernels: dict[str, tuple[float, float]]  # name -> launches and microseconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "step_us": self.step_us,
            "profiled_us": self.profiled_us,
            "idle_us": self.idle_us,
            "floor_us": self.floor_us,
            "lines": [line._asdict() for line in self.lines],
            "kernels": self.kernels,
        }


class Profiler:
    """
    >>> Profiler(llm).run(ProfileOptions(batches=(1,)))                         # doctest: +SKIP
    """

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self.llm, self.core, self.spec = llm, llm._engine.core, llm._engine.spec
        self.is_cuda = llm._engine.config.device == "cuda"
        if not self.is_cuda and find_library().library is not None:
            raise NotSupported(
                "native steps on a CPU have no operators to tell apart; set QUIRE_CPU_ISA=torch to"
                " profile torch's"
            )
        self.itemsize = getattr(torch, llm._engine.config.dtype).itemsize
        self.ceilings = device_ceilings(self.is_cuda)
        self.rng, self.ids = random.Random(seed), itertools.count(1 << 30)

    def run(self, options: ProfileOptions) -> list[StepProfile]:
        self._check(options)
        found = [self.decode(batch, options) for batch in options.batches]
        return found + [self.prefill(length) for length in options.prefills]

    def _check(self, options: ProfileOptions) -> None:
        sched = self.llm._engine.config.sched
        batch = max(options.batches, default=0)
        longest = options.context + self._num_output(batch, options)
        for name, value, most in (
            ("batch", batch, sched.max_num_seqs),
            ("context and steps", longest, sched.max_model_len),
            ("prefill", max(options.prefills, default=0), sched.max_num_batched_tokens),
        ):
            if value > most:
                raise BadRequest(f"got {name} {value}, but this engine takes at most {most}")

    def _num_output(self, batch: int, options: ProfileOptions) -> int:
        """Enough tokens that no request finishes while the last ones still read their prompts."""
        budget = self.llm._engine.config.sched.max_num_batched_tokens
        num_reading = 2 * (batch * options.context // budget + 2)
        return num_reading + WARM_STEPS + 2 * options.steps + 2

    # ------------------------------------------------------------ steps

    def decode(self, batch: int, options: ProfileOptions) -> StepProfile:
        """Steps in which `batch` requests feed one token each."""
        num = options.steps
        num_output = self._num_output(batch, options)
        ids = [self._add(self._prompt(options.context), num_output) for _ in range(batch)]
        waiting = set(ids)
        while waiting:  # until everybody has a first token
            waiting -= {event.request_id for event in self.core.step()}

        def steps() -> None:
            for _ in range(num):
                self.core.step()

        for _ in range(WARM_STEPS):
            self.core.step()
        seconds = self._time(steps)
        slices, profiled = self._watch(steps)
        num_running = self.llm.stats().num_running
        assert num_running == batch, f"{num_running} of {batch} requests were left to measure"
        self._drain(ids)
        feeds = [Feed(options.context + num, 1)] * batch
        return self._profile(f"decode, batch {batch}", feeds, slices, (seconds, profiled), num)

    def prefill(self, length: int) -> StepProfile:
        """A lone prompt, fed in one step, to its first token."""
        prompts = [self._prompt(length) for _ in range(5)]  # drawing them is not the engine's time

        def once() -> None:
            self._add(prompts.pop(), 1)
            while self.core.has_work:
                self.core.step()

        once()
        seconds = statistics.median([self._time(once) for _ in range(3)])
        slices, profiled = self._watch(once)
        feeds = [Feed(0, length)]
        return self._profile(f"prefill, {length} tokens", feeds, slices, (seconds, profiled), 1)

    def _prompt(self, num_tokens: int) -> list[int]:
        vocab = vocab_size(self.llm)
        return [self.rng.randrange(vocab) for _ in range(num_tokens)]

    def _add(self, prompt: list[int], num_output: int) -> RequestId:
        request = Request.new(next(self.ids), prompt, greedy(num_output), arrival=time.monotonic())
        self.core.add(request)
        return request.id

    def _drain(self, ids: list[RequestId]) -> None:
        for request_id in ids:
            self.core.abort(request_id)
        while self.core.has_work:
            self.core.step()

    # ------------------------------------------------------------ clocks

    def _time(self, work: Callable[[], None]) -> float:
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def _watch(self, work: Callable[[], None]) -> tuple[list[Slice], float]:
        """Slices of everything that ran, in order, and the seconds it took under the profiler."""
        activity = ProfilerActivity.CUDA if self.is_cuda else ProfilerActivity.CPU
        with profile(activities=[activity]) as watched:
            seconds = self._time(work)
        return slices_of(watched.events(), self.is_cuda), seconds

    # ------------------------------------------------------------ sums

    def _profile(
        self,
        what: str,
        feeds: list[Feed],
        slices: list[Slice],
        seconds: tuple[float, float],
        num_steps: int,
    ) -> StepProfile:
        """`seconds`: undisturbed and watched."""
        step_us, profiled_us = (s * 1e6 / num_steps for s in seconds)
        # Watching slows a CPU's operators and not a GPU's kernels: compare like with like.
        whole = step_us if self.is_cuda else profiled_us
        loads = dict(step_loads(self.spec, feeds, self.itemsize))
        loads["products"] = total(loads[name] for name in PRODUCTS)
        found = shares(slices, num_steps, self.spec.num_layers)
        lines = [self._line(share, loads.get(share.kind, Load()), whole) for share in found]
        idle = max(0.0, whole - sum(share.micros for share in found))
        del loads["products"]
        floor = total(loads.values()).seconds(self.ceilings) * 1e6
        kernels = dict(by_name(slices, num_steps))
        return StepProfile(what, step_us, profiled_us, lines, idle, floor, kernels)

    def _line(self, share: Share, load: Load, whole: float) -> Line:
        floor = load.seconds(self.ceilings) * 1e6
        kind, launches, micros, names = share.kind, share.launches, share.micros, share.names
        return Line(kind, launches, micros, micros / whole, load.num_bytes, floor, names[:4])


def slices_of(events: Iterable[FunctionEvent], is_cuda: bool) -> list[Slice]:
    """What a profiler saw: kernels of a GPU without the calls that launched them, or operators."""
    seen = [event for event in events if not event.is_user_annotation]
    if is_cuda:
        return own_times(
            Span(event.name, event.time_range.start, event.time_range.end)
            for event in seen
            if event.device_type.name == "CUDA" and is_work(event.name)
        )
    seen.sort(key=lambda event: event.time_range.start)
    return [Slice(event.name, event.self_cpu_time_total) for event in seen]


def device_ceilings(is_cuda: bool) -> Ceilings:
    """Known figures of an H200; elsewhere what a plain sum and a plain product reach here."""
    name = torch.cuda.get_device_name() if is_cuda else "this CPU"
    if "H200" in name:
        return H200
    device = torch.device("cuda" if is_cuda else "cpu")
    long = torch.ones(PROBE_BYTES // 4, device=device)
    side = torch.ones(PROBE_SIDE, PROBE_SIDE, device=device)
    wait = torch.cuda.synchronize if is_cuda else lambda: None

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            work()
            wait()
            times.append(time.perf_counter() - start)
        return min(times)

    bandwidth = PROBE_BYTES / best(long.sum)
    flops = 2 * PROBE_SIDE**3 / best(lambda: side @ side)
    return Ceilings(
        bandwidth, flops, f"{name}: a sum over {PROBE_BYTES >> 20} MiB, an fp32 product"
    )
