"""`quire route fit` beside RouteLLM's matrix factorisation, on the same examples.

Both learn from four fifths of the examples and judge the rest, five times over. RouteLLM's training
runs as its own package does it, with the settings of its example; its published weights expect the
embeddings of a service, so it gets hashed words, or what `--embeddings` names. Prints a JSON line.

    pip install routellm                                     in an environment of its own
    python benchmarks/route_llm.py examples.jsonl            lines as `quire route fit` reads them
    python benchmarks/route_llm.py examples.jsonl --embeddings rows.npy --tolerance 0.1
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from quire.answers.features import features
from quire.routing import report
from quire.routing.examples import Examples, read_examples
from quire.routing.fit import FOLDS, fit

os.environ.setdefault("OPENAI_API_KEY", "unused")  # the package makes a client when imported

from routellm.routers.matrix_factorization import train_matrix_factorization as mf

Array = NDArray[np.float64]
SMALL, LARGE = "mixtral-8x7b-instruct-v0.1", "gpt-4-1106-preview"  # names its table has
DIM, BATCH, EPOCHS, NOISE, RATE, DECAY = 128, 64, 100, 0.1, 3e-4, 1e-5  # of its example


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--embeddings", type=Path, help="[examples, size], as numpy saves them")
    args = parser.parse_args()
    examples = read_examples(args.file, None, args.tolerance)
    embeddings = (
        np.stack([features(ask.text) for ask in examples.asks])
        if args.embeddings is None
        else np.load(args.embeddings, allow_pickle=False)
    )
    fold_of = np.arange(len(examples.asks)) % FOLDS
    ours, theirs = np.empty(len(fold_of)), np.empty(len(fold_of))
    for fold in range(FOLDS):
        inside, outside = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        ours[outside] = fit(examples.at(inside), 0.9).of_all(examples.rows[outside])
        theirs[outside] = factorised(examples, embeddings, inside)[outside]
    about = {"examples": len(fold_of), "suffices": round(float(examples.suffices.mean()), 3)}
    print(json.dumps(about | {"quire": worth(ours, examples), "routellm": worth(theirs, examples)}))


def factorised(examples: Examples, embeddings: Array, inside: NDArray[np.intp]) -> Array:
    """[examples]: the chance that the small model wins, after training on those inside."""
    torch.manual_seed(0)
    won = [("model_b", "model_a")[int(one)] for one in examples.suffices]
    pairs = [
        {"model_a": SMALL, "model_b": LARGE, "idx": int(at), "winner": won[at]} for at in inside
    ]
    loader = mf.PairwiseDataset(pairs).get_dataloaders(BATCH)
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, embeddings)
        net = mf.MFModel_Train(
            DIM, len(mf.MODEL_IDS), len(embeddings), embeddings.shape[1], npy_path=file.name
        )
    mf.train_loops(net, loader, loader, RATE, DECAY, NOISE, EPOCHS, device="cpu")
    net.eval()
    count = len(embeddings)
    small, large = (torch.full((count,), mf.MODEL_IDS[name]) for name in (SMALL, LARGE))
    with torch.no_grad():
        logits = net(small, large, torch.arange(count), test=True)
    return np.asarray(torch.sigmoid(logits).double().numpy())


def worth(chances: Array, examples: Examples) -> dict[str, Any]:
    points = [report.point(chances, examples, share, 10.0) for share in report.SHARES]
    found = {
        "auc": report.auc(chances, examples.suffices),
        "gap_recovered": np.mean([one["recovered"] for one in points]),
        "calibration_error": report.calibration_error(chances, examples.suffices),
        "calibration_noise": report.calibration_noise(chances),
    }
    return {name: round(float(value), 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
