"""quire bench cpu: Quire beside other engines on this CPU, in turns within one run."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.engine_flags import model_of
from quire.cli.parser import VerbParser, positive
from quire.cli.show import note, print_json, print_table

if TYPE_CHECKING:
    from quire.bench.cpu.places import Found, Wishes

EXAMPLES = """
quire bench cpu
quire bench cpu --against llama.cpp,transformers --workloads decode,prefill --rounds 5
quire bench cpu --against llama.cpp --python-of llama.cpp=peers/bin/python model.gguf
quire bench cpu --against openvino --model-of openvino=folder-of-optimum
"""


def cpu_flags(parser: VerbParser) -> None:
    flag = parser.flag
    flag("--against", "peers, between commas (default: all that are installed)", metavar="NAMES")
    flag("--workloads", "of decode,prefill,throughput,cold (default: all)", metavar="NAMES")
    flag("--rounds", "each engine's turns", type=positive, default=3, metavar="N")
    flag("--threads", "of every engine", type=positive, default=2, metavar="N")
    flag("--quick", "tiny sizes, one round: does everything run?", action="store_true")
    for name, what in (("--python-of", "a Python that has it"), ("--model-of", "the model for it")):
        flag(name, what, action="append", default=[], metavar="PEER=PATH")


def measure_cpu(args: Namespace) -> int:
    from quire.bench.cpu.children import Children
    from quire.bench.cpu.figures import COLUMNS, figures_of, table_rows
    from quire.bench.cpu.hf_export import export
    from quire.bench.cpu.places import find_engines
    from quire.bench.cpu.rounds import Turn, run_rounds, turns
    from quire.bench.cpu.this_cpu import this_cpu
    from quire.bench.cpu.work import Sizes

    wishes, cpu = _wishes(args), this_cpu()
    note(f"{cpu.describe()}, {args.threads} threads")
    sizes, rounds = (Sizes.quick(), 1) if args.quick else (Sizes(), args.rounds)
    children = Children(args.threads, sizes)
    with tempfile.TemporaryDirectory(prefix="quire-peers-") as folder:

        def as_folder() -> Path:
            return wishes.model if wishes.model.is_dir() else export(wishes.model, Path(folder))

        found = find_engines(wishes, children, as_folder)
        _tell(found)

        def measure(turn: Turn) -> dict[str, float]:
            place = found.places[turn.engine]
            return children.measure(
                turn.engine, turn.workload, place.model, turn.round, place.python
            )

        planned = turns(found.places, wishes.workloads, rounds)
        measured = run_rounds(planned, measure, note)
    children.close()
    figures = figures_of(measured.values)
    if not args.json:
        print_table(COLUMNS, table_rows(figures))
        print()
    print_json(
        {
            "what": "cpu",
            "model": wishes.model.name,
            "cpu": cpu._asdict(),
            "threads": args.threads,
            "sizes": asdict(sizes),
            "engines": {name: place._asdict() for name, place in found.places.items()},
            "missing": found.missing,
            "failed": measured.failed,
            "neighbours": measured.neighbours,
            "figures": [figure.as_dict() for figure in figures],
        }
    )
    return 0


def _wishes(args: Namespace) -> Wishes:
    from quire.bench.cpu.engines import PEERS
    from quire.bench.cpu.places import Wishes, names_of, paths_of, workloads_of
    from quire.cli.download import fetch

    against = names_of("--against", args.against, PEERS)
    workloads = workloads_of(args.workloads)
    pythons = paths_of("--python-of", args.python_of)
    models = paths_of("--model-of", args.model_of)
    return Wishes(fetch(model_of(args)), against, workloads, pythons, models)


def _tell(found: Found) -> None:
    for name, place in found.places.items():
        note(f"{name} {place.version}".rstrip())
    for name, reason in found.missing.items():
        note(f"{name}: {reason}")
