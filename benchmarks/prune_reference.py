"""Masks and perplexity of a pruned model beside what llm-compressor makes of the same text.

    python -m benchmarks.prune_reference --model DIR --text held-out.txt --python PYTHON

`PYTHON` has `llmcompressor` and runs `prune_by_llmcompressor.py`; nothing of this project is needed
there. Both prune all of DIR, a folder of the Llama family with fp32 weights, on the same tokens,
block by block, each block seeing what the pruned ones before it make of them; ours without
reconstruction, which the package does not have. A mask's overlap is the share of weights on which
both agree whether they go. `--reversed` takes ourselves for the reference, with the sequences of
the text in reverse: the same sums in another order, so what differs then is rounding. Prints a JSON
line for each method and pattern.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.compress.calibration import Calibration
from quire.compress.passes.recipe import Recipe
from quire.compress.pipeline import Job, compress
from quire.compress.source import Source
from quire.evaluate.arms import Arm
from quire.evaluate.report import report
from quire.evaluate.run import Work
from quire.evaluate.run import run as evaluated
from quire.evaluate.texts import HeldOut
from quire.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
REFERENCE = Path(__file__).with_name("prune_by_llmcompressor.py")
CASES = (
    ("magnitude", None),
    ("wanda", None),
    ("wanda", "2:4"),
    ("sparsegpt", None),
    ("sparsegpt", "2:4"),
)


def ours(model: Path, out: Path, case: tuple[str, str | None], text: Calibration) -> None:
    method, pattern = case
    recipe = Recipe(method, pattern=pattern, plain=pattern is not None, reconstruct=False)
    compress(Job(str(model), out, recipe, text, (), CPU), lambda progress: None)


class Reversed(Calibration):
    def sequences(self, tokenizer: Tokenizer) -> Tensor:
        return super().sequences(tokenizer).flip(0)


def theirs(python: str, model: Path, ids: Path, out: Path, case: tuple[str, str | None]) -> None:
    method, pattern = case
    words = [python, str(REFERENCE), str(model), str(ids), str(out), method, pattern or "0:0"]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, out / name)


def overlaps(one: Path, other: Path) -> list[float]:
    """Of each block, over all of its pruned matrices."""
    mine, their = Source.open(str(one)), Source.open(str(other))
    found = []
    for layer in range(mine.spec.num_layers):
        names = [n for n in mine.of_layer(layer) if n.removesuffix(".weight") in mine.modules()]
        pairs = [(mine.read(name) == 0, their.read(name) == 0) for name in names]
        same = sum(int((a == b).sum()) for a, b in pairs)
        found.append(same / sum(a.numel() for a, _ in pairs))
    return found


def measure(args: argparse.Namespace, case: tuple[str, str | None], folder: Path) -> dict[str, Any]:
    text = Calibration(args.samples, args.length)
    tokenizer = Source.open(str(args.model)).tokenizer
    assert tokenizer is not None, f"{args.model} has no tokenizer"
    np.save(ids := folder / "ids.npy", text.sequences(tokenizer).numpy())
    ours(args.model, folder / "ours", case, text)
    if args.reversed:
        ours(args.model, folder / "theirs", case, Reversed(args.samples, args.length))
    else:
        theirs(args.python, args.model, ids, folder / "theirs", case)
    work = Work(HeldOut.file(args.text), args.window, args.tokens, {}, {"device": "cpu"})
    arms = [Arm(name, str(folder / name)) for name in ("ours", "theirs")]
    rows = report(evaluated(arms, Arm("original", str(args.model)), work, note), work)["rows"]
    values = {row["name"]: row["perplexity"]["value"] for row in rows}
    blocks = overlaps(folder / "ours", folder / "theirs")
    return {
        "what": "prune_reference",
        "beside": "ourselves, reversed" if args.reversed else "llm-compressor",
        "method": case[0],
        "pattern": case[1] or "half of all",
        "overlap": round(sum(blocks) / len(blocks), 6),
        "overlap_by_block": [round(value, 6) for value in blocks],
        "perplexity": values,
        "difference_percent": round(100 * (values["ours"] / values["theirs"] - 1), 3),
        "tokens": rows[0]["tokens"],
    }


def note(said: str) -> None:
    print(said, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="held out, UTF-8")
    parser.add_argument("--python", default=sys.executable, help="that has llmcompressor")
    parser.add_argument("--reversed", action="store_true", help="ourselves in another order")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--window", type=int, default=255)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--methods", default="magnitude,wanda,sparsegpt")
    args = parser.parse_args()
    for case in CASES:
        if case[0] in args.methods.split(","):
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(measure(args, case, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
