"""The suite's steps under the device's roof, as a picture. Needs matplotlib; made from the JSON.

Left: operations a second over operations per byte, where the slanted roof is the memory and the
flat one the matrix units. Right: the bytes a second that decode steps of each batch size reached.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.bench.peers import H200, VLLM, VLLM_NAME
from quire.errors import BadRequest, NotSupported

Record = dict[str, Any]
COLOURS = {"8b": "#3b6ea8", "0.6b": "#d9822b", "14b": "#4f9d69"}
MARKS = {"decode": "o", "prefill": "s"}


def achieved(record: Record, milliseconds: float) -> tuple[float, float]:
    """(TB/s, TFLOP/s) of a row's step that took so long.

    >>> achieved({"step_bytes": 4e9, "step_flops": 2e12}, 2.0)
    (2.0, 1000.0)
    """
    seconds = milliseconds / 1e3
    return record["step_bytes"] / seconds / 1e12, record["step_flops"] / seconds / 1e12


def steps_of(data: Record) -> list[Record]:
    """Rows that have one kind of step and were measured."""
    rows = [row for row in data["rows"].values() if "step_bytes" in row and "value" in row]
    if not rows:
        raise BadRequest("no decode or prefill row was measured: there is nothing to draw")
    return rows


def plot_roofline(data: Record, path: Path) -> None:
    """Writes a PNG."""
    try:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError as error:
        raise NotSupported("plots need matplotlib: pip install 'quire[plot]'") from error
    rows = steps_of(data)
    is_real = data["what"] == "h200"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5))
    _plot_roof(left, rows)
    _plot_bandwidth(right, [row for row in rows if row["kind"] == "decode"], is_real)
    figure.suptitle(
        "One H200, bf16, random weights" if is_real else "A rehearsal: no figure means anything"
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_roof(axes: Any, rows: list[Record]) -> None:
    ridge = H200.flops / H200.bandwidth  # operations per byte where both roofs meet
    spread = [row["step_flops"] / row["step_bytes"] for row in rows]
    ends = (min(0.5, *spread) / 2, max(4 * ridge, *spread) * 2)
    roof = [min(x * H200.bandwidth, H200.flops) / 1e12 for x in (ends[0], ridge, ends[1])]
    axes.loglog((ends[0], ridge, ends[1]), roof, color="black", linewidth=1)
    axes.annotate(
        f"{H200.bandwidth / 1e12:.2f} TB/s, {H200.flops / 1e12:.0f} TFLOP/s",
        (ridge, roof[1]),
        xytext=(-4, 6),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    for (shape, kind), group in _grouped(rows).items():
        points = [(r["step_flops"] / r["step_bytes"], achieved(r, r["value"])[1]) for r in group]
        axes.plot(
            *zip(*points, strict=True),
            MARKS[kind],
            color=COLOURS.get(shape, "grey"),
            label=f"{shape} {kind}",
        )
        for row, point in zip(group, points, strict=True):
            axes.annotate(
                row["step_tokens"], point, (4, -9), textcoords="offset points", fontsize=7
            )
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("TFLOP/s (labels: tokens in the step)")
    axes.legend(fontsize=8, loc="lower right")


def _grouped(rows: list[Record]) -> dict[tuple[str, str], list[Record]]:
    found: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        found.setdefault((row["shape"], row["kind"]), []).append(row)
    return found


def _plot_bandwidth(axes: Any, rows: list[Record], is_real: bool) -> None:
    usual = [row for row in rows if not row["group"].startswith("long")]
    for (shape, _), group in _grouped(usual).items():
        group.sort(key=lambda row: int(row["requests"]))
        batches = [row["requests"] for row in group]
        colour = COLOURS.get(shape, "grey")
        ours = [achieved(row, row["value"])[0] for row in group]
        axes.plot(batches, ours, "o-", color=colour, label=shape)
        if is_real and all(row["name"] in VLLM for row in group):
            theirs = [achieved(row, VLLM[row["name"]])[0] for row in group]
            axes.plot(batches, theirs, "x:", color=colour, label=f"{shape}, {VLLM_NAME}")
    axes.axhline(H200.bandwidth / 1e12, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = sorted({row["requests"] for row in usual})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("decode batch")
    axes.set_ylabel("TB/s of weights, keys and values")
    if usual:
        axes.legend(fontsize=8)
