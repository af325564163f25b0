"""What verbs print: JSON lines for machines, tables for people, colours only on a terminal.

Results go to stdout and remarks to stderr, so a pipe gets results only. Tables use `rich` on a
terminal that has it and are plain, aligned Markdown elsewhere, ready to paste.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.errors import BadRequest


def print_json(record: Mapping[str, object]) -> None:
    """One line, flushed, so that a reader sees it when it is true."""
    print(json.dumps(record, ensure_ascii=False), flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Text columns to the left, columns of numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    is_number = [all(_numeric(row[i]) for row in cells) for i in range(len(columns))]
    if sys.stdout.isatty() and _print_rich(columns, cells, is_number, title):
        return
    if title:
        print(f"{title}\n")
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        return f"| {' | '.join(parts)} |"

    rule = [
        "-" * (width - 1) + ":" if right else "-" * width
        for width, right in zip(widths, is_number, strict=True)
    ]
    print("\n".join([line(columns), line(rule), *map(line, cells)]))


def _numeric(cell: str) -> bool:
    return cell in ("", "-", "n/a") or cell.lstrip("+-~")[:1].isdigit()


def _print_rich(
    columns: Sequence[str], rows: list[list[str]], is_number: list[bool], title: str
) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for name, right in zip(columns, is_number, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*[cell.replace("[", r"\[") for cell in row])
    Console().print(table)
    return True


def save_json(out: Path, data: object) -> None:
    """As OUT.json."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write to --out {out}: {error.strerror}") from error
    note(f"saved {out}.json")
