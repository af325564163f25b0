"""A run as a picture: loss and accepted drafts over its steps. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import NotSupported

BLUE, ORANGE = "#3b6ea8", "#d9822b"


def check_plots() -> None:
    """Raises NotSupported where there is nothing to draw with: before a run, not after it."""
    _pyplot()


def plot_run(report: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG: each step, and what was held out at each checkpoint."""
    pyplot = _pyplot()
    history = report["history"]
    judged = [(0, report["before"])]
    judged += [(entry["step"], entry["held_out"]) for entry in history if "held_out" in entry]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for side, (key, label) in zip(
        axes, (("loss", "loss, nats a token"), ("accepted", "drafts accepted")), strict=True
    ):
        steps = [entry["step"] for entry in history]
        side.plot(steps, [entry[key] for entry in history], color=BLUE, alpha=0.4, label="steps")
        side.plot(
            [step for step, _ in judged],
            [found[key] for _, found in judged],
            color=ORANGE,
            marker="o",
            label="held out",
        )
        side.set_xlabel("step")
        side.set_ylabel(label)
        side.legend()
    figure.suptitle(f"{report['shape']['kind']} of {Path(report['target']).name}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError as error:
        raise NotSupported("plots need matplotlib: pip install 'quire[plot]'") from error
    return pyplot
