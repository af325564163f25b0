"""Compiles the exchange of ranks for an H200 where there is none, and counts what matters."""

from __future__ import annotations

import torch

from benchmarks.gpu_matmul import become_compiler
from quire.kernels import peer_exchange
from quire.kernels.peer_exchange import Exchange, Verb, constants

COUNTED = ("st.release.sys", "ld.acquire.sys", "bar.sync")


def main() -> None:
    become_compiler()
    for verb in Verb:
        words = torch.zeros(4, dtype=torch.int64)
        options = constants(Exchange(1, 3, words), verb, 8) | {"PLAIN": False}
        kernel = peer_exchange._exchange_kernel.warmup(
            *(words, words, words, 4, 1, 1, 1), grid=(1, 1, 1), **options
        )
        made = kernel.asm["ptx"]
        print(verb.name, *(f"{word} {made.count(word)}" for word in COUNTED))


if __name__ == "__main__":
    main()
