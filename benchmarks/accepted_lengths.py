"""Tokens a step, by how drafts are drawn: with the target's noise or likeliest, chain or tree.

Every step feeds all drafts (`adaptive` off), so a number is a count and the same on any machine. A
mean of `accepted` + 1 over all steps that drafted; `standard_error` is over prompts. The output is
compared with none's.

    python -m benchmarks.accepted_lengths                          the head that comes along
    python -m benchmarks.accepted_lengths --model qwen2.5-coder-1.5b-instruct \
        --config '{"method": "draft_model", "model": "qwen2.5-coder-0.5b-instruct"}' --prompts code
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.runner.drafter import ModelDrafter
from quire.runner.feature_drafter import FeatureDrafter
from quire.runner.medusa_drafter import MedusaDrafter
from quire.runner.rows import TEMPERATURE, RequestRows
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
def likeliest(llm: LLM) -> Iterator[None]:
    """Drafts as most engines draw them: the drafter's best token, at any temperature."""
    drafter = llm._engine.runner.drafter
    if isinstance(drafter, ModelDrafter):
        with cold(drafter.runner.rows):
            yield
        return
    assert isinstance(drafter, (FeatureDrafter, MedusaDrafter)), "texts draw nothing"
    graphs, drafter.graphs = drafter.graphs, None  # they read the requests' own temperatures
    try:
        with cold(drafter._draws.rows):
            yield
    finally:
        drafter.graphs = graphs  # type: ignore[assignment]


@contextmanager
def cold(rows: RequestRows) -> Iterator[None]:
    """The drafter's view of the rows has a temperature of 0 in all; the target's stays."""
    own = rows.float_columns
    assert TEMPERATURE == 0, "it is the first column"
    rows.float_columns = (torch.zeros_like(own[0]), *own[1:])
    try:
        yield
    finally:
        rows.float_columns = own


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
    ways = ("coupled", "likeliest")
    for heat in (0.0, 1.0):
        plain = [output.outputs[0].token_ids for output in answers(llm, args, heat, 0)]
        for draws in ways[:1] if tree or not heat else ways:
            with likeliest(llm) if draws == "likeliest" else nullcontext():
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
