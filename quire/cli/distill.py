"""quire distill: train a drafter or a student on what its target writes."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bars import counted_bar
from quire.cli.judging import add_report_flags, check_report_flags, judged, save_judged, show_judged
from quire.cli.main import did_you_mean
from quire.cli.parser import VerbParser, positive, whole
from quire.cli.show import note, print_json
from quire.errors import BadRequest, QuireError

if TYPE_CHECKING:
    from quire.distill.loop import Progress
    from quire.distill.recipe import Recipe

EXAMPLES = """
quire distill default --kind early_exit --layers 8 --out exit
quire distill default --kind draft_model --layers 3 --steps 2000 --out draft
quire distill TEACHER --kind student --from SHRUNK --own-share 0.25 --out student
quire generate --speculative-config '{"method": "draft_model", "model": "draft"}' 'Hello'
"""
QUIET_S = 5.0  # between lines, where there is no terminal


def build_parser() -> VerbParser:
    from quire.distill.pupil import KINDS

    purpose = (
        "Train a drafter or a student from what its target writes. A run that was killed goes on\n"
        "with the same command."
    )
    parser = VerbParser("distill", purpose, EXAMPLES, "TARGET --kind KIND --out DIR")
    parser.add_argument("target", metavar="TARGET", help="the model to learn from")
    flag, count = parser.flag, whole(0, 1 << 30)
    flag("--kind", ", ".join(KINDS.entries), metavar="KIND", required=True)
    flag("--out", "folder to write, or to go on with", metavar="DIR", required=True)
    flag("--from", "checkpoint that the pupil begins with", metavar="MODEL", dest="start")
    flag("--layers", "of a draft model, or before an exit", type=positive, metavar="N")
    flag("--hidden", "width of a fresh draft model", type=positive, metavar="N")
    flag("--ffn", "width of its feed-forward blocks", type=positive, metavar="N")
    flag("--vocab", "tokens that a head knows, the commonest", type=positive, metavar="N")
    flag("--depth", "tokens ahead that heads learn", type=whole(1, 16), metavar="N")
    flag("--prompts", "UTF-8, one a line; default: the built-in ones", metavar="FILE")
    flag("--free-share", "of answers without a prompt, begun anywhere", type=float, default=0.0)
    flag("--answers", "that the target writes", type=positive, default=512)
    flag("--tokens", "of an answer, at most", type=positive, default=192)
    flag("--temperatures", "of answers, in turns", type=_numbers, default="0,1")
    flag("--steps", "of training", type=positive, default=200)
    flag("--batch", "answers read at once", type=positive, default=4)
    flag("--accumulate", "batches in a step", type=positive, default=1)
    flag("--learning-rate", "at its height", type=float, default=3e-4)
    flag("--warmup", "steps up to there", type=count, default=20)
    flag("--weight-decay", "of matrices", type=float, default=0.0)
    flag("--hidden-loss", "weight of the distance of hidden states", type=float, default=0.0)
    flag("--own-share", "of answers that are the pupil's own", type=float, default=0.0)
    flag("--save-every", "steps", type=positive, default=50)
    flag("--seed", "of answers, order and fresh weights", type=count, default=0)
    flag("--device", "auto, cpu or cuda", default="auto", choices=("auto", "cpu", "cuda"))
    flag("--threads", "of a CPU", type=positive, metavar="N")
    flag("--plot", "loss and accepted drafts as a PNG, drawn as they come", metavar="FILE")
    flag("--json", "the report as one JSON object", action="store_true")
    add_report_flags(parser, "--judged-tokens", ", a student")
    return parser


def run(args: Namespace) -> int:
    from quire.distill.pupil import KINDS

    if args.kind not in KINDS.entries:
        raise BadRequest(
            f"unknown kind {args.kind!r}{did_you_mean(args.kind, list(KINDS.entries))}"
        )
    recipe = _recipe(args)
    from quire.distill.answers import prompts_of

    prompts_of(recipe.corpus)  # before anything is fetched
    if args.plot:
        from quire.picture import check_picture

        check_picture(Path(args.plot))
    check_report_flags(args)
    from quire.cli.download import fetch

    for name in filter(None, (args.target, args.start)):
        fetch(name)
    from quire.distill.loop import Job, distil
    from quire.runner.device import pick_device

    device = pick_device(args.device)[0]
    draw = _drawn(Path(args.plot)) if args.plot else None
    with _progress() as listen:
        report = distil(Job(recipe, Path(args.out), device, args.threads, draw), listen)
    found = judged(args, args.target) if args.kind == "student" else None
    if args.json:
        print_json({**report, "judged": found})
    else:
        _print_report(args.out, report)
        show_judged(found)
    save_judged(args, found)
    return 0


def _drawn(path: Path) -> Callable[[Mapping[str, Any]], None]:
    """A run is not lost to its picture."""
    from quire.distill.plot import plot_run

    def draw(report: Mapping[str, Any]) -> None:
        try:
            plot_run(report, path)
        except QuireError as error:
            note(f"note: {error}")

    return draw


def _recipe(args: Namespace) -> Recipe:
    from quire.distill.recipe import Corpus, Recipe, Schedule, Shape

    shape = Shape(args.kind, args.start, args.layers, args.hidden, args.ffn, args.vocab, args.depth)
    corpus = Corpus(
        answers=args.answers,
        tokens=args.tokens,
        temperatures=args.temperatures,
        prompts=args.prompts,
        seed=args.seed,
        free_share=args.free_share,
    )
    schedule = Schedule(
        steps=args.steps,
        batch=args.batch,
        accumulate=args.accumulate,
        learning_rate=args.learning_rate,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        hidden_loss=args.hidden_loss,
        own_share=args.own_share,
        seed=args.seed,
        save_every=args.save_every,
    )
    return Recipe(args.target, shape, corpus, schedule)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"got {text!r}, want numbers between commas") from None


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar with loss and accepted drafts; now and then a line where there is no terminal."""
    if not sys.stderr.isatty():
        yield _Lines().tell
        return
    with counted_bar() as bar:
        tasks: dict[str, Any] = {}

        def tell(made: Progress) -> None:
            if made.what not in tasks:
                tasks[made.what] = bar.add_task(made.what, total=made.total)
            bar.update(tasks[made.what], completed=made.done, description=_line(made))
            if made.held_out is not None:
                bar.console.print(f"{made.done}: {_held_out(made.held_out)}", style="dim")

        yield tell


class _Lines:
    def __init__(self) -> None:
        self._told = 0.0

    def tell(self, made: Progress) -> None:
        is_due = time.monotonic() - self._told > QUIET_S
        if is_due or made.held_out is not None or made.done == made.total:
            self._told = time.monotonic()
            more = "" if made.held_out is None else f"; {_held_out(made.held_out)}"
            note(f"{made.done}/{made.total} {_line(made)}{more}")


def _line(made: Progress) -> str:
    if made.loss is None:
        return made.what
    return f"{made.what}: loss {made.loss:.3f}, {made.accepted:.2f} drafts accepted"


def _held_out(found: Any) -> str:
    return f"held out: loss {found['loss']:.3f}, {found['accepted']:.2f} drafts accepted"


def _print_report(out: str, report: dict[str, Any]) -> None:
    for when in ("before", "after"):
        note(f"{when}: {_held_out(report[when])}")
    values, seconds = report["trained_values"], report["seconds"]
    note(f"{values / 1e6:.1f} million values trained in {seconds:.0f} s")
    print(out)
