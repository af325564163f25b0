"""Tokens a step, by how drafts are drawn: with the target's noise or likeliest, chain or tree.

Every step feeds all drafts (`adaptive` off), so a number is a count and the same on any machine. A
mean of `accepted` + 1 over all steps that drafted; `standard_error` is over prompts. The output is
compared with none's. Likeliest drafts are drawn on a CPU alone.

    python -m benchmarks.accepted_lengths                          the head that comes along
    python -m benchmarks.accepted_lengths --model qwen2.5-coder-1.5b-instruct \
        --config '{"method": "draft_model", "model": "qwen2.5-coder-0.5b-instruct"}' --prompts code
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from quire import LLM, RequestOutput, SamplingParams
from quire.runner import draft_draws, drafter
from quire.runner.rows import HIDDEN, MIN_P, NOT_GREEDY, TOP_K, TOP_P
from quire.speculative import parse_speculative

PROMPTS = {
    "chat": [
        "Tell me about the history of lighthouses.",
        "What are the main differences between a violin and a cello?",
        "How do I boil an egg so that the yolk stays soft?",
        "Why is the sky blue in the morning?",
        "Write a short letter to Anna that thanks for a book about the sea.",
        "Explain to a child how a bicycle stays upright.",
    ],
    "code": [
        "Write a Python module that parses, validates and sorts dates, with type hints.",
        "Write a Python class for a queue with a limit, with doctests.",
        "Write a function in C that reverses a linked list, and explain it.",
        "Write a SQL query that finds customers without an order this year.",
    ],
}
SEEDS = 2  # answers to each prompt


@contextmanager
def likeliest() -> Iterator[None]:
    """Drafts as most engines draw them: the drafter's best token, at any temperature."""
    kept_out = HIDDEN | NOT_GREEDY | TOP_K | TOP_P | MIN_P
    with patch.object(drafter, "HIDDEN", kept_out), patch.object(draft_draws, "HIDDEN", kept_out):
        yield


def answers(llm: LLM, args: argparse.Namespace, heat: float, depth: int | None) -> list[Any]:
    params = [
        SamplingParams(
            temperature=heat,
            max_tokens=args.tokens,
            seed=seed,
            ignore_eos=True,
            num_speculative_tokens=depth,
        )
        for seed in range(SEEDS)
        for _ in PROMPTS[args.prompts]
    ]
    chats = [[{"role": "user", "content": text}] for text in PROMPTS[args.prompts] * SEEDS]
    llm.reset_prefix_cache()  # pages of a request without drafts lack the head's keys
    return llm.chat(chats, params, use_tqdm=False)


def lengths(outputs: list[RequestOutput], drafts_a_step: int) -> dict[str, float]:
    """A step with drafts gives what was accepted and one token more."""
    means = []
    for output in outputs:
        assert output.metrics is not None and output.metrics.num_drafted_tokens
        steps = output.metrics.num_drafted_tokens / drafts_a_step
        means.append(1 + output.metrics.num_accepted_tokens / steps)
    error = statistics.stdev(means) / len(means) ** 0.5
    mean = statistics.fmean(means)
    return {"tokens_a_step": round(mean, 3), "standard_error": round(error, 3)}


def measure(args: argparse.Namespace, tree: int) -> Iterator[dict[str, Any]]:
    config = json.loads(args.config) | {"adaptive": False, "num_speculative_tokens": args.depth}
    if tree:
        config |= {"tree": tree, "num_speculative_tokens": args.tree_size}
    llm = LLM(
        args.model,
        device=args.device,
        max_model_len=1024,
        max_num_seqs=16,
        num_threads=args.threads,
        speculative_config=config,
    )
    fed = int(config["num_speculative_tokens"])
    # Draws of a GPU go by each row's own temperature, whatever a step's needs are said to be.
    ways = ("coupled", "likeliest") if args.device == "cpu" else ("coupled",)
    for heat in (0.0, 1.0):
        plain = [output.outputs[0].token_ids for output in answers(llm, args, heat, 0)]
        for draws in ways[:1] if tree or not heat else ways:
            with likeliest() if draws == "likeliest" else patch.dict({}):
                outputs = answers(llm, args, heat, None)
            yield {
                "what": "accepted lengths",
                "shape": f"tree of {tree}" if tree else "chain",
                "drafts": fed,
                "temperature": heat,
                "drawn": draws,
                **lengths(outputs, fed),
                "same": [output.outputs[0].token_ids for output in outputs] == plain,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="default")
    parser.add_argument("--config", default='{"method": "eagle3"}')
    parser.add_argument("--prompts", choices=PROMPTS, default="chat")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tree-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    has_trees = parse_speculative(json.loads(args.config)).method in ("eagle3", "medusa", "mtp")
    for tree in (0, 2) if has_trees else (0,):
        for row in measure(args, tree):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
