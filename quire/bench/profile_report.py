"""Step profiles as tables: time, bytes and distance to the floor of every kind of work."""

from __future__ import annotations

from quire.bench.markdown import markdown_table, number
from quire.bench.profile import Line, StepProfile
from quire.bench.roofline import Ceilings

COLUMNS = ("work", "launches", "us", "of step", "MB", "floor us", "gap us", "TB/s")
LONGEST = 20  # kernels listed by their own name


def profile_rows(found: StepProfile) -> list[list[str]]:
    rows = [_row(line) for line in found.lines]
    whole = sum(line.micros for line in found.lines) + found.idle_us
    share = found.idle_us / whole if whole else 0.0
    gap = number(found.idle_us)
    rows.append(["between kernels", "", number(found.idle_us), f"{share:.1%}", "", "", gap, ""])
    num_bytes = sum(line.num_bytes for line in found.lines)
    rows.append(
        [
            "whole step",
            number(sum(line.launches for line in found.lines)),
            number(whole),
            "100.0%",
            number(num_bytes / 1e6),
            number(found.floor_us),
            number(whole - found.floor_us),
            number(num_bytes / whole / 1e6) if whole else "",
        ]
    )
    return rows


def _row(line: Line) -> list[str]:
    return [
        line.kind,
        number(line.launches),
        number(line.micros),
        f"{line.share:.1%}",
        number(line.num_bytes / 1e6) if line.num_bytes else "",
        number(line.floor) if line.floor else "",
        number(line.micros - line.floor),
        number(line.num_bytes / line.micros / 1e6) if line.num_bytes and line.micros else "",
    ]


def heading(found: StepProfile) -> str:
    return (
        f"{found.what}: {found.step_us / 1e3:.3f} ms undisturbed,"
        f" {found.profiled_us / 1e3:.3f} ms while watched,"
        f" floor {found.floor_us / 1e3:.3f} ms"
    )


def kernel_rows(found: StepProfile) -> list[list[str]]:
    """The kernels that took longest, by their own names."""
    return [
        [name[:80], number(launches), number(micros)]
        for name, (launches, micros) in list(found.kernels.items())[:LONGEST]
    ]


def markdown(profiles: list[StepProfile], ceilings: Ceilings) -> str:
    parts = [
        f"### {heading(found)}\n\n{markdown_table(COLUMNS, profile_rows(found))}\n\n"
        + markdown_table(("kernel", "launches", "us"), kernel_rows(found))
        for found in profiles
    ]
    parts.append(
        f"Floors are for {ceilings.bandwidth / 1e12:.2f} TB/s and {ceilings.flops / 1e12:.1f}"
        f" TFLOP/s ({ceilings.source}); MB are weights, keys and values alone."
    )
    return "\n\n".join(parts) + "\n"
