"""The suite's results as a table beside the figures of others. Nothing is measured or printed here.

Ratios are of speed: above 1 is faster than the other, whether the figure is a time or a rate. The
mean is geometric and leaves start-up out, which differs by another order of magnitude.
"""

from __future__ import annotations

import math
from typing import Any

from quire.bench.machine import Rates
from quire.bench.markdown import markdown_table, number
from quire.bench.peers import H200, TARGETS, VLLM, VLLM_NAME, VLLM_SOURCE
from quire.bench.suite import Row, h200_suite

Record = dict[str, Any]

COLUMNS = ("workload", "unit", "Quire", "target", "limit", VLLM_NAME, "speed / vLLM", "of limit")


def speed_ratio(row: Row, ours: float, theirs: float) -> float:
    """
    >>> ms, rate = h200_suite().select(["decode-8b-1", "mixed-8b"]).rows
    >>> speed_ratio(ms, 4.0, 5.0), speed_ratio(rate, 4.0, 5.0)
    (1.25, 0.8)
    """
    return theirs / ours if row.is_lower_better else ours / theirs


def summary(data: Record) -> Record:
    """Every row with what it is compared to, and the mean."""
    is_real = data["what"] == "h200"
    lines = [_line(row, data["rows"][row.name], is_real) for row in _known_rows(data)]
    ratios = [
        line["vs_vllm"] for line in lines if line["vs_vllm"] is not None and line["kind"] != "start"
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    return {
        "what": data["what"],
        "geomean_vs_vllm": mean,
        "num_compared": len(ratios),
        "rows": lines,
    }


def _known_rows(data: Record) -> list[Row]:
    return [row for row in h200_suite().rows if row.name in data["rows"]]


def _line(row: Row, record: Record, is_real: bool) -> Record:
    value = record.get("value")
    limit, vllm = (record.get("limit"), VLLM.get(row.name)) if is_real else (None, None)
    return {
        "name": row.name,
        "title": row.title,
        "kind": row.kind,
        "unit": row.unit,
        "value": value,
        "target": TARGETS.get(row.name) if is_real else None,
        "limit": limit,
        "vllm": vllm,
        "vs_vllm": None if value is None or vllm is None else speed_ratio(row, value, vllm),
        "of_limit": None if value is None or limit is None else 1 / speed_ratio(row, limit, value),
        "problem": record.get("skipped") or record.get("error"),
    }


def table_rows(found: Record) -> list[list[str]]:
    return [
        [
            line["title"],
            line["unit"],
            "failed" if line["problem"] else number(line["value"]),
            number(line["target"]),
            number(line["limit"]),
            number(line["vllm"]),
            _share(line["vs_vllm"], "{:.2f}x"),
            _share(line["of_limit"], "{:.0%}"),
        ]
        for line in found["rows"]
    ]


def _share(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def mean_line(found: Record) -> str:
    if found["geomean_vs_vllm"] is None:
        return f"No row can be compared with {VLLM_NAME}."
    return (
        f"Geometric mean of the speed over {VLLM_NAME}, {found['num_compared']} rows without"
        f" start-up: {found['geomean_vs_vllm']:.3f}x"
    )


def markdown(data: Record) -> str:
    """The table, the mean, what the columns mean, and on which engines it was measured."""
    found = summary(data)
    notes = [
        f"- {VLLM_NAME}: {VLLM_SOURCE}.",
        f"- limit: all weights, keys and values read once a step at {H200.bandwidth / 1e12:.2f}"
        f" TB/s or all operations done at {H200.flops / 1e12:.0f} TFLOP/s, whichever takes longer"
        f" ({H200.source}). For throughput rows a bound that no schedule reaches.",
    ]
    if data["what"] != "h200":
        notes.insert(0, "- A rehearsal on tiny models: none of these figures means anything.")
    notes += [f"- {line['title']}: {line['problem']}" for line in found["rows"] if line["problem"]]
    for shape, record in data.get("engines", {}).items():
        engine = record["engine"]
        if "H200" not in engine["device"]:
            notes.append(f"- {shape} ran on {engine['device']}: ratios here compare machines.")
        notes.append(f"- {shape}: " + ", ".join(f"{k} {v}" for k, v in engine.items() if v))
        for when, rates in record.get("machine", {}).items():
            notes.append(f"- {shape}, {when} its rows: the machine {Rates(**rates).describe()}.")
    table = markdown_table(COLUMNS, table_rows(found))
    return f"{table}\n\n{mean_line(found)}\n\n" + "\n".join(notes) + "\n"
