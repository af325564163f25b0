"""quire quantize: make a smaller model of a model, and say what it cost."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.main import did_you_mean
from quire.cli.parser import VerbParser, positive, whole
from quire.cli.show import note, print_json, print_table
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.compress.pipeline import Progress

EXAMPLES = """
quire quantize qwen2.5-coder-0.5b-instruct --method gptq --out qwen-gptq
quire quantize MODEL --method awq --group-size 64 --calibration mine.txt --out DIR
quire quantize MODEL --method rtn --bits 8 --out DIR         needs no text, takes seconds
quire quantize MODEL --method gguf --type Q4_K --out DIR     a file for llama.cpp too
quire generate --model DIR 'The capital of France is'
"""
SHOWN = 6  # projections in the closing table


def build_parser() -> VerbParser:
    from quire.compress.methods import METHODS

    purpose = "Quantise a model: fewer bits a weight, in a layout that vLLM and transformers read."
    parser = VerbParser("quantize", purpose, EXAMPLES, "MODEL --method METHOD --out DIR")
    parser.add_argument("model", metavar="MODEL", help="name, folder or .gguf file")
    parser.flag("--method", ", ".join(METHODS), metavar="METHOD", required=True)
    parser.flag("--out", "folder to write, or to go on with", metavar="DIR", required=True)
    parser.flag("--bits", "of a weight; default: what is usual", type=whole(2, 8), metavar="N")
    parser.flag(
        "--group-size",
        "inputs that share a scale, 0 for a whole row; default: what is usual",
        type=whole(0, 1 << 20),
        metavar="N",
    )
    parser.flag("--asymmetric", "groups have zeros of their own", action="store_true")
    parser.flag(
        "--keep",
        "projections left as they are, by name or pattern; none: all are quantised"
        " (default: lm_head; gguf: none)",
        metavar="NAME,NAME",
    )
    parser.flag("--calibration", "UTF-8 text; default: the built-in one", metavar="FILE")
    parser.flag("--samples", "sequences of calibration text", type=positive, default=64)
    parser.flag("--length", "tokens of each", type=positive, default=512)
    parser.flag("--no-act-order", "gptq: round inputs in their order", action="store_true")
    parser.flag(
        "--no-static-groups", "gptq: groups follow the act order (g_idx)", action="store_true"
    )
    parser.flag("--static-inputs", "fp8: one input scale, from calibration", action="store_true")
    parser.flag("--type", "gguf: type of most tensors", default="Q4_K")
    parser.flag("--device", "auto, cpu or cuda", default="auto", choices=("auto", "cpu", "cuda"))
    parser.flag("--json", "the report as one JSON object", action="store_true")
    return parser


def run(args: Namespace) -> int:
    from quire.compress.methods import METHODS

    if args.method not in METHODS:
        raise BadRequest(f"unknown method {args.method!r}{did_you_mean(args.method, METHODS)}")
    from quire.cli.download import fetch

    fetch(args.model)
    from quire.compress.calibration import Calibration
    from quire.compress.passes.recipe import Recipe
    from quire.compress.pipeline import Job, quantise
    from quire.runner.device import pick_device

    recipe = Recipe(
        method=args.method,
        bits=args.bits,
        group=args.group_size,
        asymmetric=args.asymmetric,
        act_order=not args.no_act_order,
        static_groups=not args.no_static_groups,
        static_inputs=args.static_inputs,
        storage=args.type,
    )
    file = None if args.calibration is None else Path(args.calibration)
    job = Job(
        args.model,
        Path(args.out),
        recipe,
        Calibration(args.samples, args.length, file),
        _kept(args.keep, args.method),
        pick_device(args.device)[0],
    )
    with _progress() as listen:
        report = quantise(job, listen)
    if args.json:
        print_json(report)
    else:
        _print_report(args.out, report)
    return 0


def _kept(words: str | None, method: str) -> tuple[str, ...]:
    """A GGUF file has types of more bits for heads."""
    if words is None:
        return () if method == "gguf" else ("lm_head",)
    return tuple(word for word in words.split(",") if word and word != "none")


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar with the time left and the error of each block; lines where there is no terminal."""
    if not sys.stderr.isatty():
        yield _Lines().tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("quantising", total=None)

        def tell(made: Progress) -> None:
            bar.update(task, total=made.total, completed=made.done)
            bar.console.print(_line(made), style="dim")

        yield tell


class _Lines:
    def __init__(self) -> None:
        self._begun, self._fresh = time.perf_counter(), 0

    def tell(self, made: Progress) -> None:
        self._fresh += not made.is_resumed
        line = _line(made)
        if self._fresh and made.done < made.total:
            each = (time.perf_counter() - self._begun) / self._fresh
            line += f", about {each * (made.total - made.done):.0f} s left"
        note(line)


def _line(made: Progress) -> str:
    error = "" if made.error is None else f": error {made.error:.2e}"
    again = " (was there)" if made.is_resumed else ""
    return f"{made.done}/{made.total} {made.what}{error}{again}"


def _print_report(out: str, report: dict[str, Any]) -> None:
    worst = sorted(report["projections"].items(), key=lambda item: -item[1]["error"])[:SHOWN]
    if worst:
        rows = [(name, f"{v['error']:.2e}", f"{v['range']:.3f}") for name, v in worst]
        print_table(("projection", "error", "range"), rows, "largest relative errors")
    for remark in report["remarks"]:
        note(f"note: {remark}")
    note(
        f"{report['bytes'] / 1e6:.1f} MB in {report['seconds']:.0f} s,"
        f" mean error {report['mean_error']:.2e}"
    )
    print(out)
