"""The ladder as a picture. Needs matplotlib, which nothing else here does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import NotSupported

BLUE, GREY, ORANGE = "#3b6ea8", "#c9ced6", "#d9822b"


def plot_ladder(summary: dict[str, Any], path: Path) -> None:
    """Writes a PNG: speed of each rung, and below it the cache it reserved and used."""
    try:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError as error:
        raise NotSupported("plots need matplotlib: pip install 'quire[plot]'") from error
    rungs = [rung for rung in summary["rungs"] if "tok_s" in rung]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6.5), sharex=True)
    _plot_speed(above, rungs)
    _plot_cache(below, rungs, summary["kv_budget_mib"])
    figure.suptitle(
        f"One technique after another: {summary['requests']} requests on {summary['device']}, "
        f"{summary['dtype']}"
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_speed(axes: Any, rungs: list[dict[str, Any]]) -> None:
    names = [rung["name"].replace(" ", "\n") for rung in rungs]
    bars = axes.bar(names, [rung["tok_s"] for rung in rungs], color=BLUE)
    axes.bar_label(bars, [f"{r['tok_s']:.0f}\n({r['vs_first']:.1f}x)" for r in rungs], fontsize=8)
    axes.set_ylabel("output tokens / s")
    axes.margins(y=0.2)


def _plot_cache(axes: Any, rungs: list[dict[str, Any]], budget: float) -> None:
    names = [rung["name"].replace(" ", "\n") for rung in rungs]
    reserved = [rung["kv_reserved_mib"] or 0 for rung in rungs]
    used = [rung["kv_used_mib"] or 0 for rung in rungs]
    bars = axes.bar(names, reserved, color=GREY, label="reserved, peak")
    axes.bar(names, used, color=BLUE, label="used then")
    axes.bar_label(bars, [f"{rung['peak_running']} at once" for rung in rungs], fontsize=8)
    axes.axhline(budget, color=ORANGE, linestyle="--", linewidth=1, label="budget")
    axes.set_ylabel("KV cache, MiB")
    axes.margins(y=0.25)
    axes.legend(fontsize=8, loc="upper left")
