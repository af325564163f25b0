"""Results as rows for people and records for machines; nothing is printed here."""

from __future__ import annotations

from typing import Any

from quire.bench.drive import Run
from quire.bench.ladder import LadderResult, Rung
from quire.bench.workload import percentile

LADDER_COLUMNS = (
    "technique",
    "tok/s",
    "vs previous",
    "vs first",
    "claimed",
    "TTFT p50 s",
    "TTFT p95 s",
    "pause p99 ms",
    "requests at once",
    "KV reserved MiB",
    "KV used MiB",
    "waste",
)


def ladder_records(result: LadderResult) -> list[dict[str, Any]]:
    """One record per rung; None where there is nothing to say."""
    records: list[dict[str, Any]] = []
    first = previous = None
    for rung in result.rungs:
        record: dict[str, Any] = {"name": rung.name, "claimed": rung.claimed, "note": rung.note}
        if rung.run is not None:
            record |= _run_record(rung, rung.run, result)
            speed = record["tok_s"]
            first = first or speed
            record["vs_first"] = round(speed / first, 2)
            record["vs_previous"] = round(speed / previous, 2) if previous else None
            previous = speed
        records.append(record)
    return records


def _run_record(rung: Rung, run: Run, result: LadderResult) -> dict[str, Any]:
    is_all, peak = rung.sample is None, run.peak_reserved
    gaps = run.gaps
    mib = result.slot_bytes / 2**20
    return {
        "requests": len(run.outputs),
        "of_requests": len(result.jobs),
        "output_tokens": run.num_tokens,
        "seconds": round(run.seconds, 3),
        "tok_s": round(run.num_tokens / run.seconds, 2),
        # A sample spends less time in the queue: its waiting times would mislead.
        "ttft_p50_s": round(percentile(run.ttfts, 0.5), 3) if is_all else None,
        "ttft_p95_s": round(percentile(run.ttfts, 0.95), 3) if is_all else None,
        "pause_p99_ms": round(percentile(gaps, 0.99) * 1000, 1) if gaps else None,
        "peak_running": run.peak_running,
        "kv_reserved_mib": round(peak.reserved * mib, 2) or None,
        "kv_used_mib": round(peak.used * mib, 2) or None,
        "kv_waste": None if run.waste is None else round(run.waste, 3),
        "steps": run.num_steps,
        "preempted": rung.num_preempted,
    }


def ladder_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for r in records:
        if "tok_s" not in r:
            rows.append([r["name"], "n/a", "n/a", "n/a", r["claimed"], *["n/a"] * 7])
            continue
        part = r["requests"] < r["of_requests"]
        name = (
            f"{r['name']} ({r['requests']} of {r['of_requests']} requests)" if part else r["name"]
        )
        rows.append(
            [
                name,
                f"{r['tok_s']:.1f}",
                _shown(r["vs_previous"], "{:.2f}x"),
                f"{r['vs_first']:.2f}x",
                r["claimed"],
                _shown(r["ttft_p50_s"], "{:.2f}"),
                _shown(r["ttft_p95_s"], "{:.2f}"),
                _shown(r["pause_p99_ms"], "{:.0f}"),
                str(r["peak_running"]),
                _shown(r["kv_reserved_mib"], "{:.1f}"),
                _shown(r["kv_used_mib"], "{:.1f}"),
                _shown(r["kv_waste"], "{:.0%}"),
            ]
        )
    return rows


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def ladder_summary(result: LadderResult) -> dict[str, Any]:
    """The whole run as one JSON object."""
    options = result.options
    jobs = result.jobs
    return {
        "what": "ladder",
        "device": result.device,
        "dtype": result.dtype,
        "requests": len(jobs),
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "output_tokens": sum(job.num_output for job in jobs),
        "kv_budget_mib": round(result.num_pages * result.page_size * result.slot_bytes / 2**20, 2),
        "budget_rows": options.budget_rows,
        "page_size": result.page_size,
        "outputs_identical": not result.differing,
        "differing": result.differing,
        "rungs": ladder_records(result),
    }


def identical_line(result: LadderResult) -> str:
    if not result.differing:
        return "outputs identical: yes"
    shown = "; ".join(result.differing[:3])
    return f"outputs identical: no ({len(result.differing)} differ: {shown})"
