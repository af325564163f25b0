"""SchedStats: one look at the scheduler and its pages, cheap enough for every step."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from quire.kv.manager import KVManager


@dataclass(slots=True)
class Counts:
    """What the scheduler has counted since its start."""

    steps: int = 0
    fed: int = 0
    output: int = 0
    preempted: int = 0
    finished: int = 0
    recomputed: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class SchedStats:
    num_running: int
    num_waiting: int
    num_steps: int
    num_fed_tokens: int  # recomputation after preemption included
    num_output_tokens: int
    num_preempted: int
    num_finished: int
    num_recomputed_tokens: int  # fed again after a preemption
    pages_total: int
    pages_live: int
    pages_cached: int
    pages_empty: int
    pages_evicted: int
    pages_copied: int
    slots_wasted: int  # reserved but unwritten: at most one part page per request, plus reserve
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_drafted_tokens: int = 0  # guesses verified
    num_accepted_tokens: int = 0  # of those, the ones that became output

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hit_tokens / max(1, self.prefix_query_tokens)

    @property
    def kv_usage(self) -> float:
        return self.pages_live / max(1, self.pages_total)

    def as_dict(self) -> dict[str, float]:
        return {
            **asdict(self),
            "prefix_hit_rate": round(self.prefix_hit_rate, 4),
            "kv_usage": round(self.kv_usage, 4),
        }


def stats_of(
    counts: Counts, kv: KVManager, num_running: int, num_waiting: int, num_computing: int
) -> SchedStats:
    """`num_computing` counts tokens of running requests with keys and values, in flight or not."""
    alloc = kv.allocator
    return SchedStats(
        num_running=num_running,
        num_waiting=num_waiting,
        num_steps=counts.steps,
        num_fed_tokens=counts.fed,
        num_output_tokens=counts.output,
        num_preempted=counts.preempted,
        num_finished=counts.finished,
        num_recomputed_tokens=counts.recomputed,
        pages_total=alloc.num_pages,
        pages_live=alloc.num_live,
        pages_cached=alloc.num_cached,
        pages_empty=alloc.num_empty,
        pages_evicted=alloc.num_evicted,
        pages_copied=kv.counts.copied_pages,
        slots_wasted=kv.num_reserved - num_computing * kv.num_groups,
        prefix_query_tokens=kv.counts.prompt_tokens,
        prefix_hit_tokens=kv.counts.hit_tokens,
        num_drafted_tokens=counts.drafted,
        num_accepted_tokens=counts.accepted,
    )
