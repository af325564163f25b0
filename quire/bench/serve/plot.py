"""A load test as a picture: how first tokens, gaps and whole answers are spread, and the pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.plot import BLUE, ORANGE
from quire.bench.serve.client import Outcome
from quire.bench.serve.figures import gaps, timings
from quire.errors import NotSupported


def plot_load(record: dict[str, Any], outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes a PNG. Raises NotSupported where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError as error:
        raise NotSupported("plots need matplotlib: pip install 'quire[plot]'") from error
    good = [outcome for outcome in outcomes if outcome.failure is None]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5))
    times = [timings(outcome) for outcome in good]
    _spread(axes[0][0], "time to first token, ms", [one["ttft"] for one in times])
    _spread(axes[0][1], "gap between pieces, ms", [gap for one in good for gap in gaps(one)])
    _spread(axes[1][0], "end to end, ms", [one["e2e"] for one in times])
    _pace(axes[1][1], outcomes)
    figure.suptitle(
        f"{record['model']}: {record['requests']} requests ({record['failed']} failed), "
        f"{record['output_tokens_per_s']:.0f} output tokens/s"
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _spread(axes: Any, title: str, values: list[float]) -> None:
    ranked = sorted(value * 1e3 for value in values)
    shares = [100.0 * (index + 1) / len(ranked) for index in range(len(ranked))]
    axes.plot(ranked, shares, color=BLUE)
    axes.set_xlabel(title)
    axes.set_ylabel("% at or below")
    if ranked and ranked[-1] > 20 * max(ranked[len(ranked) // 2], 1e-6):
        axes.set_xscale("log")
    axes.grid(alpha=0.3)


def _pace(axes: Any, outcomes: Sequence[Outcome]) -> None:
    pieces = Counter(int(at) for outcome in outcomes for at in outcome.token_times)
    sent = Counter(int(outcome.meant) for outcome in outcomes)
    seconds = range(max([*pieces, *sent], default=0) + 1)
    axes.plot(seconds, [pieces[s] for s in seconds], color=BLUE, label="pieces of text / s")
    axes.plot(seconds, [sent[s] for s in seconds], color=ORANGE, label="requests / s")
    axes.set_xlabel("second")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
