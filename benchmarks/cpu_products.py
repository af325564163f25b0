"""Packed products on this CPU, one instruction set against the other: the same bits, how fast?

Sets take turns within a round, so a machine that slows down slows all of them. Prints a JSON line
with the best of the rounds for each weight and number of rows. Run from the repository root.

    python -m benchmarks.cpu_products                                  every set this CPU has
    python -m benchmarks.cpu_products --isas amx,avx512vnni --threads 4
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from quire.native.library import Library, open_library
from quire.native.linear import NativeLinear
from tests.native.weights import FORMS

WEIGHTS = {"Q4_1": "4 bits, offsets", "Q8_0": "8 bits", "Q4_K": "4 bits, offsets, two levels"}
SHAPES = ((1536, 576), (4096, 4096))  # (outputs, inputs)
ROWS = (1, 16, 64, 512)
ROUNDS, ROUND_S = 5, 0.1


def seconds_each(linear: NativeLinear, x: torch.Tensor) -> float:
    """Of one product, over a round's worth of them."""
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < ROUND_S:
        linear(x)
        count += 1
    return spent / count


def compare(library: Library, isas: list[str], name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = NativeLinear.of([FORMS[WEIGHTS[name]](*shape)], None, library)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        library.use_isa("plain")
        want = linear(x[-1:])
        best: dict[str, float] = {}
        for _ in range(ROUNDS):
            for isa in isas:
                library.use_isa(isa)
                assert torch.equal(linear(x)[-1:], want), f"{isa}: other bits than plain C"
                best[isa] = min(best.get(isa, 1e9), seconds_each(linear, x))
        work = 2 * rows * shape[0] * shape[1]
        gops = {isa: round(work / seconds / 1e9, 1) for isa, seconds in best.items()}
        print(json.dumps({"weight": name, "shape": shape, "rows": rows, "gop_s": gops}))


def main() -> None:
    library = open_library()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isas", default=",".join(library.isas[:-1]), help="names, best first")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    library.set_threads(options.threads)
    for name in WEIGHTS:
        for shape in SHAPES:
            compare(library, options.isas.split(","), name, shape)


if __name__ == "__main__":
    main()
