"""A run as a picture: loss and accepted drafts over its steps. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.picture import pyplot, save_picture

BLUE, ORANGE = "#3b6ea8", "#d9822b"


def plot_run(report: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG: each step, and what was held out at each checkpoint."""
    history = report["history"]
    judged = [(0, report["before"])]
    judged += [(entry["step"], entry["held_out"]) for entry in history if "held_out" in entry]
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.5))
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
    save_picture(figure, path)
