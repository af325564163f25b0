"""quire route fit: learn from examples when a small model suffices, for `model: "auto"`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_engine_flags
from quire.cli.parser import VerbParser
from quire.cli.show import note, print_json, print_table
from quire.errors import BadRequest, NotSupported

if TYPE_CHECKING:
    from quire.routing.examples import Scorer

EXAMPLES = """
quire route fit examples.jsonl                     scores are in the file
quire route fit examples.jsonl --likelihood qwen2.5-coder-1.5b-instruct
quire route fit examples.jsonl --judge './judge.py --strict' --out route.json
"""


def build_parser() -> VerbParser:
    purpose = (
        "Learn when a small model suffices. A line of FILE has `prompt` or `messages`, and\n"
        "`small_score` and `large_score`; or `small` and `large`, two answers to be scored.\n"
        "With `small_mean_logprob` in all lines a limit for the cascade is learned too.\n"
        "A fifth of the lines is held out, and judges what was learned."
    )
    parser = VerbParser("route", purpose, EXAMPLES, "fit FILE")
    parser.add_argument("verb", choices=("fit",))
    parser.add_argument("file", type=Path, metavar="FILE")
    flag = parser.flag
    flag("--out", "where to write the route", type=Path, default=Path("route.json"), metavar="FILE")
    flag("--plot", "picture (default: as --out, .png)", type=Path, metavar="FILE")
    flag("--likelihood", "score answers by this model's log-likelihood", metavar="MODEL")
    flag("--judge", "command that reads answers and writes scores, a line each", metavar="CMD")
    flag("--tolerance", "by how much the small one's score may be lower", type=float, default=0.0)
    flag("--keep", "share of the large one's gain that is kept", type=float, default=0.9)
    flag("--cost-ratio", "cost of the large model over the small", type=float, default=10.0)
    flag("--json", "one JSON object", action="store_true")
    add_engine_flags(parser)
    return parser


def run(args: Namespace) -> int:
    if not 0.0 < args.keep <= 1.0:
        raise BadRequest(f"got --keep {args.keep:g}, want above 0 and up to 1")
    if not args.cost_ratio >= 1.0 or not args.tolerance >= 0.0:
        raise BadRequest("want --cost-ratio >= 1 and --tolerance >= 0")
    from quire.routing.examples import read_examples
    from quire.routing.report import fit_and_report, table

    examples = read_examples(args.file, _scorer(args), args.tolerance)
    made = fit_and_report(examples, args.keep, args.cost_ratio)
    made.save(args.out)
    about = made.about or {}
    if args.json:
        print_json(about)
    else:
        print_table(*table(about))
        for sentence in _meaning(about):
            note(sentence)
    _plot(about, args.plot or args.out.with_suffix(".png"))
    return 0


def _scorer(args: Namespace) -> Scorer | None:
    if args.likelihood and args.judge:
        raise BadRequest("got --likelihood and --judge; give one of them")
    if args.judge:
        from quire.routing.judge import judged_by

        return judged_by(args.judge)
    if not args.likelihood:
        return None
    from quire.cli.engine_flags import open_llm
    from quire.evaluate.likelihood import answer_likelihoods

    args.model, args.model_word = args.likelihood, None
    return lambda asked: answer_likelihoods(open_llm(args), asked)


def _meaning(about: dict[str, Any]) -> list[str]:
    kind = {"platt": "a sigmoid", "isotonic": "steps"}[about["curve"]]
    return [
        f"learned from {about['learned_from']} examples, judged on {about['held_out']} others;"
        f" the small model suffices for {about['suffices']:.0%} of them",
        f"calibration error {about['calibration_error']:.3f} (by {kind}; perfect chances would show"
        f" {about['calibration_noise']:.3f} on so few), AUC {about['auc']:.3f}, log loss"
        f" {about['log_loss']:.3f} (without features {about['log_loss_without']:.3f})",
        f"gap recovered, mean over all shares: {about['gap_recovered']:.3f}; a coin: 0.5",
    ]


def _plot(about: dict[str, Any], path: Path) -> None:
    from quire.routing.plot import plot_route

    try:
        plot_route(about, path)
    except NotSupported as error:
        note(f"note: no {path.name}: {error}")
