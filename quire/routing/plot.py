"""A route as a picture: quality over cost beside tossing a coin, and what was told against what
came true. Needs matplotlib; made from the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import NotSupported

BLUE, ORANGE, GREY = "#3b6ea8", "#d9822b", "#999999"


def plot_route(about: dict[str, Any], path: Path) -> None:
    """Writes a PNG. Raises NotSupported where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError as error:
        raise NotSupported("plots need matplotlib: pip install 'quire[plot]'") from error
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    points = about["points"]
    costs, quality = ([one[name] for one in points] for name in ("cost", "quality"))
    left.plot(costs, quality, color=BLUE, marker="o", markersize=3, label="this route")
    left.plot([costs[0], costs[-1]], [quality[0], quality[-1]], "--", color=GREY, label="a coin")
    for name, color in (("chosen", ORANGE), ("cascade", "#5a9e4b")):
        if about[name] is not None:
            one = about[name]
            left.plot(one["cost"], one["quality"], "D", color=color, label=name)
    left.set_xlabel("cost; 1: all by the large model")
    left.set_ylabel("mean score")
    left.legend(fontsize=8)
    bins = about["reliability"]
    right.plot([0, 1], [0, 1], "--", color=GREY)
    right.plot([b["told"] for b in bins], [b["true"] for b in bins], "o-", color=BLUE)
    right.set_xlabel("chance told that the small model suffices")
    right.set_ylabel("share for which it did")
    right.set_title(f"calibration error {about['calibration_error']:.3f}", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    learned, judged = about["learned_from"], about["held_out"]
    figure.suptitle(f"learned from {learned} examples, judged on {judged} others")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
