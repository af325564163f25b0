"""Quire beside other engines on this CPU: same weights, same work, interleaved in one run.

Each measurement of each engine is a process of its own. Engines take turns within a round, so a
machine that slows down slows everyone. The table shows medians over the rounds; compare the ratios,
not the absolutes. fp32 throughout, except "quire-packed", which keeps the file's own numbers. Other
engines read a folder exported from our own GGUF.

    python benchmarks/cpu_peers.py                    the default model, 3 rounds
    python benchmarks/cpu_peers.py --quick            a smoke run with tiny sizes
    python benchmarks/cpu_peers.py --model m.gguf --peers quire,transformers --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_export import export
from peer_engines import ANY_PEER, OURS, PEERS, Sizes

from quire.cli.show import note, print_table
from quire.load.hub import resolve_model

QUICK = Sizes(
    decode_prompt=16,
    decode_output=6,
    prefill=32,
    requests=4,
    prompt_low=8,
    prompt_high=16,
    output_low=8,
    output_high=12,
    context=48,
    skew_rows=2,
)
TIMEOUT_S = 1800
Results = dict[tuple[str, str], list[float]]  # (engine, metric) -> one value per round


def run_child(peer: str, what: str, model: str, seed: int, sizes: Sizes) -> dict[str, float]:
    """One measurement in a fresh process; raises RuntimeError with its last words."""
    options = json.dumps({"model": model, "seed": seed, **asdict(sizes)})
    script = Path(__file__).with_name("peer_engines.py")
    threads = str(sizes.threads)
    env = os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    start = time.time()
    with subprocess.Popen(
        [sys.executable, str(script), peer, what, options],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        out, errors = child.communicate(timeout=TIMEOUT_S)
    if child.returncode:
        last = (errors.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"{peer} {what} failed: {last}")
    record = dict(json.loads(out.strip().splitlines()[-1]))
    if what == "cold":
        return {"cold_s": record["first_token_at"] - start}
    return record


def measure(peers: list[str], models: dict[str, str], rounds: int, sizes: Sizes) -> Results:
    results: Results = defaultdict(list)
    tasks = [(peer, what) for what in (*ANY_PEER, "cold") for peer in peers]
    tasks += [("quire", what) for what in OURS]
    broken: set[tuple[str, str]] = set()
    for number in range(rounds):
        for peer, what in tasks:
            if (peer, what) in broken:
                continue
            note(f"round {number + 1} of {rounds}: {peer} {what}")
            try:
                found = run_child(peer, what, models[peer], number + 1, sizes)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                if peer == "quire":
                    raise
                note(str(error))  # a peer that cannot do it is left out, and said so
                broken.add((peer, what))
                continue
            for metric, value in found.items():
                results[peer, metric].append(value)
    return results


def medians(results: Results) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (peer, metric), values in results.items():
        found[peer][metric] = round(statistics.median(values), 4)
    return dict(found)


def ratios(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Ours over theirs, larger is better for us; and each technique over its absence."""
    ours = found["quire"]
    out = {
        "continuous_over_static": ours["continuous_tok_s"] / ours["static_tok_s"],
        "prefix_miss_over_hit": ours["miss_ttft_s"] / ours["hit_ttft_s"],
        "recompute_over_kv_cache": ours["recomputed_s"] / ours["cached_s"],
    }
    for peer, theirs in found.items():
        if peer == "quire":
            continue
        for metric, value in theirs.items():
            is_time = metric.endswith("_s") and not metric.endswith("tok_s")
            ratio = value / ours[metric] if is_time else ours[metric] / value
            out[f"{metric}_vs_{peer}"] = ratio
    return {key: round(value, 3) for key, value in out.items()}


def show(found: dict[str, dict[str, float]], against: dict[str, float]) -> None:
    metrics = list(dict.fromkeys(metric for values in found.values() for metric in values))
    rows = [[m, *(f"{v[m]:.4g}" if m in v else "-" for v in found.values())] for m in metrics]
    print_table(("measurement", *found), rows)
    print()
    print_table(("ratio", "x"), [(key, f"{value:.2f}") for key, value in against.items()])
    print()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="a known name or a .gguf file")
    parser.add_argument("--peers", help="comma-separated; default: those that can be imported")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--folder", help="where the exported weights go; default: a temporary one")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    known = [name for name in PEERS if importlib.util.find_spec(name.split("-")[0]) is not None]
    peers = args.peers.split(",") if args.peers else known
    if unknown := set(peers) - set(known) or {"quire"} - set(peers):
        raise SystemExit(f"error: cannot measure {sorted(unknown)}; want quire and any of {known}")
    base = QUICK if args.quick else Sizes()
    sizes = Sizes(**{**asdict(base), "threads": args.threads})
    source = resolve_model(args.model)
    with tempfile.TemporaryDirectory(prefix="quire-peers-") as temporary:
        folder = export(source, Path(args.folder or temporary) / "hf")
        models = {peer: str(source if "quire" in peer else folder) for peer in peers}
        results = measure(peers, models, 1 if args.quick else args.rounds, sizes)
    found = medians(results)
    against = ratios(found)
    show(found, against)
    record: dict[str, Any] = {"what": "cpu_peers", "quick": args.quick, "threads": args.threads}
    print(json.dumps({**record, "medians": found, "ratios": against}))


if __name__ == "__main__":
    main()
