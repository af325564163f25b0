"""Simulations of several rates as one picture: latency and goodput as the load grows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.plot import BLUE, ORANGE
from quire.errors import NotSupported


def plot_sweep(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a PNG. Raises NotSupported where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError as error:
        raise NotSupported("plots need matplotlib: pip install 'quire[plot]'") from error
    rates = [record["rate"] for record in records]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name, color in (("p50", BLUE), ("p99", ORANGE)):
        left.plot(rates, [r["ttft_ms"][name] for r in records], color=color, label=f"ttft {name}")
        gaps = [(r["gap_ms"] or {}).get(name, 0.0) for r in records]
        left.plot(rates, gaps, color=color, linestyle="--", label=f"gap {name}")
    left.set_yscale("log")
    left.set_ylabel("ms")
    right.plot(rates, [r["requests_per_s"] for r in records], color=BLUE, label="answered")
    if all("goodput" in r for r in records):
        good = [r["goodput"]["requests_per_s"] for r in records]
        right.plot(rates, good, color=ORANGE, label="within the promise")
    right.set_ylabel("requests / s")
    for axes in (left, right):
        axes.set_xlabel("requests / s asked")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{records[0]['model']} on {records[0]['device']}, simulated")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
