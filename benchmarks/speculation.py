"""Speculation against none: the same tokens, how much sooner?

One engine answers the same requests with drafts, without and without again, in turns, so a machine
that slows down slows all; what the last two differ by is noise. Prints a JSON line with the median
of the rounds. On a machine that others use too, `--shared` counts the processor's time of one
thread. Run from the repository root.

    python -m benchmarks.speculation                                    suffix, a prompt to copy
    python -m benchmarks.speculation --config '{"method": "ngram"}' --prompt chat --requests 32
    python -m benchmarks.speculation --model qwen2.5-coder-1.5b-instruct --prompt code \
        --config '{"method": "draft_model", "model": "qwen2.5-coder-0.5b-instruct"}'
    python -m benchmarks.speculation --drafter wrong --shared           or perfect
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

from quire import LLM, RequestOutput, SamplingParams
from quire.request import Request
from quire.spec.proposer import Guess
from quire.spec.speculation import Speculation

PASSAGE = (
    "The harbour office opens at seven. Every boat that enters the harbour must show its papers at"
    " the desk, pay the fee of twelve coins, and wait for the bell. When the bell rings twice, the"
    " gate opens and the boats go in one after the other. A boat that goes in before the bell rings"
    " pays the fee again. The keeper writes the name of the boat, the name of its master and the"
    " hour into the large book on the desk."
)
PROMPTS = {
    "copy": f"Copy this text word for word.\n\nText:\n{PASSAGE}\n\nCopy:\n",
    "chat": "Tell me about the history of lighthouses.",
    "code": "Write a Python module that parses, validates and sorts dates, with type hints.",
}
# Answers of earlier rounds would make every draft right.
SUFFIX = '{"method": "suffix", "suffix_decoding_max_cached_requests": 0}'


class Wrong:
    def propose(self, request: Request, most: int) -> Guess:
        return Guess((0.8,) * most, (5,) * most)

    def forget(self, request: Request) -> None:
        pass


class Perfect:
    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self.answers = answers

    def propose(self, request: Request, most: int) -> Guess:
        known = self.answers[tuple(request.tokens[: request.num_prompt])]
        tokens = tuple(known[request.num_output : request.num_output + most])
        return Guess((0.8,) * len(tokens), tokens)

    def forget(self, request: Request) -> None:
        pass


def ask(
    llm: LLM,
    options: argparse.Namespace,
    depth: int | None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, int, list[RequestOutput]]:
    """(seconds, steps, answers)"""
    params = [
        SamplingParams(
            temperature=options.temperature,
            max_tokens=options.tokens,
            seed=seed,
            ignore_eos=True,
            num_speculative_tokens=depth,
        )
        for seed in range(options.requests)
    ]
    text = PROMPTS[options.prompt]
    chats = [
        [{"role": "user", "content": f"{seed}. {text}" if seed else text}]
        for seed in range(options.requests)
    ]
    llm.reset_prefix_cache()
    steps, begun = llm.stats().num_steps, clock()
    outputs = llm.chat(chats, params, use_tqdm=False)
    return clock() - begun, llm.stats().num_steps - steps, outputs


def opened(options: argparse.Namespace, clock: Callable[[], float]) -> LLM:
    with patch("time.perf_counter", clock):  # which the engine measures its steps by
        return LLM(
            options.model,
            device="cpu",
            max_model_len=2048,
            max_num_seqs=max(32, options.requests),
            num_threads=1 if options.shared else options.threads,
            speculative_config=json.loads(options.config),
        )


def take_turns(llm: LLM, options: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Any]:
    _, num_plain, plain = ask(llm, options, 0)
    drafts = llm._engine.core.drafts
    assert isinstance(drafts, Speculation)
    if options.drafter is not None:
        known = {tuple(o.prompt_token_ids or ()): o.outputs[0].token_ids for o in plain}
        drafts.proposer = Wrong() if options.drafter == "wrong" else Perfect(known)
    spent: dict[str, list[float]] = {"none": [], "drafts": [], "none again": []}
    outputs, num_drafting = plain, num_plain
    for turn in range(options.rounds):
        for name in sorted(spent, reverse=turn % 2 > 0):
            depth = None if name == "drafts" else 0
            seconds, num_steps, answers = ask(llm, options, depth, clock)
            spent[name].append(seconds)
            if name == "drafts":
                num_drafting, outputs = num_steps, answers
    usual = {name: median(seconds) for name, seconds in spent.items()}
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    return {
        "seconds": {name: round(seconds, 3) for name, seconds in usual.items()},
        "times": round(usual["none"] / usual["drafts"], 3),
        "noise": round(usual["none"] / usual["none again"], 3),
        "steps": {"none": num_plain, "drafts": num_drafting},
        "drafted": sum(m.num_drafted_tokens for m in metrics),
        "accepted": sum(m.num_accepted_tokens for m in metrics),
        "same": [o.outputs[0].token_ids for o in outputs]
        == [o.outputs[0].token_ids for o in plain],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="default")
    parser.add_argument("--config", default=SUFFIX)
    parser.add_argument("--prompt", choices=PROMPTS, default="copy")
    parser.add_argument("--drafter", choices=("wrong", "perfect"))
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--shared", action="store_true", help="others use the machine: one thread")
    options = parser.parse_args()
    clock = time.process_time if options.shared else time.perf_counter
    made = take_turns(opened(options, clock), options, clock)
    asked = {name: getattr(options, name) for name in ("prompt", "requests", "temperature")}
    print(json.dumps({"config": options.drafter or options.config, **asked, **made}))


if __name__ == "__main__":
    main()
