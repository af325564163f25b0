"""The work that every engine does, and what is counted of it.

An engine offers one thing, `generate`: exactly so many tokens of each prompt, greedy, token ids in.
The workloads are written once against that. Only the standard library is used here: this file runs
in the Python of any peer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Prompts = list[list[int]]
MODEL_CONTEXT = 2048  # tokens that an engine with one request is ready for


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work, in tokens; `quick` is for seeing whether everything runs."""

    decode_prompt: int = 128
    decode_output: int = 128
    prefill: int = 1024
    requests: int = 32
    prompt_low: int = 64
    prompt_high: int = 256
    output_low: int = 64
    output_high: int = 128

    @staticmethod
    def quick() -> Sizes:
        return Sizes(
            decode_prompt=16,
            decode_output=6,
            prefill=32,
            requests=4,
            prompt_low=8,
            prompt_high=16,
            output_low=8,
            output_high=12,
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is opened with. The same for all, so that none reserves more than another."""

    model: str
    threads: int
    num_seqs: int  # requests at once
    context: int  # tokens of each


class Peer(Protocol):
    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        """Seconds to make exactly so many tokens of each prompt, all given at once."""
        ...


def setup_of(workload: str, model: str, threads: int, sizes: Sizes) -> Setup:
    if workload == "throughput":
        return Setup(model, threads, sizes.requests, sizes.prompt_high + sizes.output_high)
    return Setup(model, threads, 1, MODEL_CONTEXT)


class Prompter:
    """Random prompts, new ones each time so that no cache helps; the same for every engine."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __call__(self, length: int) -> list[int]:
        return [self.rng.randrange(300, 40_000) for _ in range(length)]


def decode(peer: Peer, sizes: Sizes, prompt: Prompter) -> dict[str, float]:
    """(N - 1) / (T(N) - T(1)): the prompt's share taken out."""
    peer.generate([prompt(sizes.decode_prompt)], [4])
    first = min(peer.generate([prompt(sizes.decode_prompt)], [1]) for _ in range(2))
    whole = peer.generate([prompt(sizes.decode_prompt)], [sizes.decode_output])
    return {"decode_tok_s": (sizes.decode_output - 1) / (whole - first)}


def prefill(peer: Peer, sizes: Sizes, prompt: Prompter) -> dict[str, float]:
    peer.generate([prompt(sizes.prefill)], [1])
    seconds = min(peer.generate([prompt(sizes.prefill)], [1]) for _ in range(2))
    return {"prefill_tok_s": sizes.prefill / seconds}


def throughput(peer: Peer, sizes: Sizes, prompt: Prompter) -> dict[str, float]:
    """All requests at once; only tokens that were asked for count."""
    rng = random.Random(0)
    prompts, lengths = [], []
    for _ in range(sizes.requests):
        prompts.append(prompt(rng.randint(sizes.prompt_low, sizes.prompt_high)))
        lengths.append(rng.randint(sizes.output_low, sizes.output_high))
    peer.generate(prompts[:2], [4, 4])
    return {"output_tok_s": sum(lengths) / peer.generate(prompts, lengths)}


def cold(peer: Peer, sizes: Sizes, prompt: Prompter) -> dict[str, float]:
    """A first short answer. Whoever started the process has the clock."""
    peer.generate([prompt(16)], [1])
    return {"peak_mb": peak_memory_mb()}


def peak_memory_mb() -> float:
    """The most this process had resident; what it was before `exec` does not count."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            (line,) = (line for line in status if line.startswith("VmHWM"))
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    return int(line.split()[1]) / 1024


WORKLOADS: dict[str, Callable[[Peer, Sizes, Prompter], dict[str, float]]] = {
    "decode": decode,
    "prefill": prefill,
    "throughput": throughput,
    "cold": cold,
}
