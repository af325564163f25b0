"""A plan as a picture: goodput over what the devices cost, or over how many there are."""

from __future__ import annotations

from pathlib import Path

from quire.bench.plot import BLUE, ORANGE
from quire.errors import NotSupported
from quire.sim.plan import Answer, Plan

COLOURS = (BLUE, ORANGE, "#4f9d69", "#8a5fb0", "#b04a5a")


def plot_plan(plan: Plan, title: str, path: Path) -> None:
    """Writes a PNG. Raises NotSupported where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError as error:
        raise NotSupported("plots need matplotlib: pip install 'quire[plot]'") from error
    has_prices = all(one.price is not None for one in plan.answers)

    def place(one: Answer) -> tuple[float, float]:
        expense = one.price if has_prices and one.price is not None else one.option.num_devices
        return float(expense), one.best.good_tokens_s if one.best else 0.0

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    kinds = dict.fromkeys(one.option.device.name for one in plan.answers)
    for kind, colour in zip(kinds, COLOURS, strict=False):
        own = [one for one in plan.answers if one.option.device.name == kind]
        places = [place(one) for one in own]
        label = f"{kind}, {' and '.join(dict.fromkeys(one.label for one in own))}"
        axes.plot(*zip(*places, strict=True), "o", color=colour, label=label, markersize=5)
    for one, what, at in (
        *((one, "best by goodput", (6, 14)) for one in plan.by_goodput()[:1]),
        *((one, "best by price of a token", (6, -16)) for one in plan.by_cost()[:1]),
    ):
        text = f"{what}: {one.option}"
        axes.annotate(text, place(one), at, textcoords="offset points", fontsize=8)
    axes.set_xlabel("price of an hour" if has_prices else "devices")
    axes.set_ylabel("output tokens / s within the promise")
    axes.margins(y=0.15)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if kinds:
        axes.legend(fontsize=8, loc="lower right")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
