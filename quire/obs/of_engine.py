"""Readings of parts of the engine, made of the counts that it sends: tiers, ranks, drafts.

`now` has them as the engine last sent them, `totals` summed over all engines so far.
`metrics.py` puts them beside what the API process counts itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.obs.exposition import Reading
from quire.obs.totals import EngineTotals
from quire.speculative import MAX_DEPTH

Counts = Mapping[str, float]


def of_tiers(now: Counts, totals: EngineTotals) -> dict[str, Reading]:
    """Of pages outside the pool."""
    return {
        "kv_tier_loads": {(t,): totals[f"kv_loads_{t}"] for t in ("memory", "disk", "remote")},
        "kv_tier_loaded_bytes": totals["kv_loaded_bytes"],
        "kv_tier_pulls": totals["kv_pulls"],
        "kv_tier_pull_seconds": totals["kv_pull_seconds"],
        "kv_tier_saves": totals["kv_saves"],
        "kv_tier_written_bytes": totals["kv_written_bytes"],
        "kv_tier_drops": totals["kv_drops"],
        "kv_tier_bad_pages": totals["kv_bad"],
        "kv_tier_bytes": {(t,): now.get(f"kv_{t}_bytes", 0) for t in ("memory", "disk")},
    }


def of_ranks(now: Counts, totals: EngineTotals) -> dict[str, Reading]:
    """Of the processes that hold the model, and of experts, if these may have several homes."""
    imbalance = {when: f"rank_imbalance_{when}" for when in ("before", "after")}
    moves = "num_rebalances" in totals.sums
    return {
        "ranks": now.get("num_ranks", 0),
        "expert_rebalances": {(): totals["num_rebalances"]} if moves else {},
        "experts_read": {(): totals["num_experts_read"]} if moves else {},
        "experts_copied": {(): now.get("num_experts_copied", 0)} if moves else {},
        "rank_imbalance": {(w,): now[name] for w, name in imbalance.items() if name in now},
    }


def of_drafts(now: Counts, totals: EngineTotals) -> dict[str, Reading]:
    return {
        "spec_decode_num_drafts": totals["num_draft_runs"],
        "spec_decode_num_draft_tokens": totals["num_drafted_tokens"],
        "spec_decode_num_accepted_tokens": totals["num_accepted_tokens"],
        "spec_decode_num_accepted_tokens_per_pos": {
            (str(i),): totals[f"accepted_at_{i}"]
            for i in range(MAX_DEPTH)
            if not i or f"accepted_at_{i}" in now
        },
        "spec_decode_draft_seconds": totals["draft_seconds"],
    }
