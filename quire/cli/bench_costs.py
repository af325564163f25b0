"""quire bench costs: what steps take here, as the table that `quire simulate` goes by."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from quire.cli.engine_flags import model_of, open_llm
from quire.cli.parser import VerbParser
from quire.cli.show import note, print_json, print_table

EXAMPLES = """
quire bench costs --out costs.json
quire bench costs qwen2.5-coder-0.5b-instruct --max-num-seqs 16 --out costs.json
quire simulate costs.json --rate 2 --slo ttft=500,gap=100
"""


def costs_flags(parser: VerbParser) -> None:
    parser.flag("--out", "the table, for 'quire simulate'", default="costs.json", metavar="FILE")


def measure_step_costs(args: Namespace) -> int:
    from quire.bench.step_costs import measure_costs

    llm = open_llm(args, skip_tokenizer_init=True)
    table = measure_costs(llm._engine, Path(model_of(args)).name, note if not args.json else _quiet)
    table.write(Path(args.out))
    if not args.json:
        rows = [
            (n, f"{seconds * 1e3:.3f}")
            for n, seconds in zip(table.tokens, table.times, strict=True)
        ]
        print_table(("tokens fed", "ms"), rows)
        print()
    print_json(
        {
            "what": "costs",
            "model": table.engine.model,
            "file": args.out,
            "steps": len(table.points),
            "fit_error": round(table.fit_error, 4),
            "context_us": round(table.context_s * 1e6, 5),
            "pair_ns": round(table.pair_s * 1e9, 5),
            "sample_us": round(table.sample_s * 1e6, 3),
            "host_us": round(table.host_s * 1e6, 2),
            "host_work_us": round(table.host_work_s * 1e6, 3),
        }
    )
    return 0


def _quiet(line: str) -> None:
    return
