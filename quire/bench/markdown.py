"""A Markdown table from columns and rows, with the notes that belong under it."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The first column is text, the others are aligned to the right.

    >>> print(markdown_table(("what", "ms"), [("decode", 4.5)]))
    | what | ms |
    |---|---:|
    | decode | 4.5 |
    """
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    shown = [f"| {' | '.join(map(str, line))} |" for line in lines]
    shown[1] = shown[1].replace(" ", "")
    return "\n".join(shown)


def number(value: float | None, digits: int = 4) -> str:
    """A few significant digits, with commas between thousands; None is a dash.

    >>> number(4.5123), number(11857.2), number(0.28311), number(None)
    ('4.512', '11,857', '0.2831', '-')
    """
    if value is None:
        return "-"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if value else "0"
