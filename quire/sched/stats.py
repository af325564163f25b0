"""SchedStats: one look at the scheduler and its pages, cheap enough for every step."""

from __future__ import annotations

from dataclasses import asdict, dataclass


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
