"""Quality against size as a picture. Needs matplotlib; made from the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.picture import pyplot, save_picture

BLUE, ORANGE = "#3b6ea8", "#d9822b"


def plot_quality(found: dict[str, Any], path: Path) -> None:
    """Writes a PNG: perplexity over the weights' bytes, and the divergence where there is one."""
    rows, against = found["rows"], found["against"]
    figure, axes = pyplot().subplots(
        1, 2 if against else 1, figsize=(11 if against else 6, 4.5), squeeze=False
    )
    _plot(axes[0][0], [(row, row["perplexity"]) for row in rows], "perplexity")
    if against:
        compared = [(row, row["against"]["kl_mean"]) for row in rows if "against" in row]
        _plot(axes[0][1], compared, f"divergence from {against}, nats a token")
        if any(pair["value"] > 0 for _, pair in compared):
            axes[0][1].set_yscale("log")
    text = found["text"]
    figure.suptitle(f"{text['name']}, {text['windows']} windows of {text['window']} tokens")
    figure.tight_layout()
    save_picture(figure, path)


def _plot(axes: Any, points: list[tuple[dict[str, Any], dict[str, Any]]], what: str) -> None:
    for row, pair in points:
        size = row["size"]["weight_bytes"] / 1e6
        colour = BLUE if "against" in row else ORANGE
        axes.errorbar(size, pair["value"], yerr=pair["error"], fmt="o", color=colour, capsize=3)
        place = {"xytext": (5, 5), "textcoords": "offset points", "fontsize": 8}
        axes.annotate(row["name"], (size, pair["value"]), **place)
    axes.set_xlabel("weights in memory, MB")
    axes.set_ylabel(what)
    axes.margins(0.15)
