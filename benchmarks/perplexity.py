"""Perplexity of a text in several ways of computing, and whether they differ.

    python benchmarks/perplexity.py --text FILE
    python benchmarks/perplexity.py --model qwen2.5-coder-0.5b-instruct --text FILE --tokens 4096
    python benchmarks/perplexity.py --text FILE --arms float32,head@32,all@rowx2,qkv@row/down@32

An arm is `packed` (weights as the file holds them, native products), `float32` (the same numbers
expanded), or products with a block: `down+out@32` is float32 with the inputs of these products
rounded to int8, one scale for each 32 of them, or with `row` for a row; `x2` rounds to the 15 bits
of two int8. So arms of single products tell which of them cost accuracy, and others what a finer
rounding would save. Every arm is compared with the first one, window by window: the change of
perplexity with its standard error, and in how many windows it rose. `token_rms` is how far the
logarithm of a token's probability moves; its square adds up over products, and it needs few tokens
where the change itself drowns in noise. One JSON line for each arm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.models.decoder import Decoder

KINDS = ("qkv", "out", "up", "down", "head")
MOST = {"": 127, "2": 127 * 128}  # of one int8, and of two


@dataclass(frozen=True, slots=True)
class Rounding:
    block: int  # 0: a row
    most: int  # the largest whole number

    def __call__(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, self.block or x.shape[-1]))
        step = blocks.abs().amax(-1, keepdim=True) / self.most
        return (torch.round(blocks / step).nan_to_num() * step).flatten(-2)


def read_arm(word: str) -> dict[str, Rounding] | None:
    """How the inputs of some products are rounded; None for the engine's own ways."""
    if word in ("packed", "float32"):
        return None
    found = {}
    for part in word.split("/"):
        names, _, how = part.partition("@")
        block, _, planes = how.partition("x")
        kinds = KINDS if names == "all" else tuple(names.split("+"))
        known = set(kinds) <= set(KINDS) and (block.isdigit() or block == "row")
        if not known or planes not in MOST:
            raise SystemExit(f"error: got {word!r}, want packed, float32 or such as down+out@32x2")
        rounding = Rounding(0 if block == "row" else int(block), MOST[planes])
        found |= dict.fromkeys(kinds, rounding)
    return found


def round_inputs(model: Decoder, roundings: dict[str, Rounding]) -> None:
    def after(kernel: Callable[[Tensor], Tensor], rounding: Rounding) -> Callable[[Tensor], Tensor]:
        return lambda x: kernel(rounding(x))

    linears = [("head", model.head)]
    for block in model.blocks:
        linears += (block.attn.linears() | block.mlp.linears()).items()
    for name, linear in linears:
        if name in roundings:
            assert linear.kernel is not None
            linear.kernel = after(linear.kernel, roundings[name])


def window_losses(args: argparse.Namespace, word: str) -> list[list[float]]:
    """Negative logarithms of each window's tokens but the first."""
    arm = read_arm(word)
    llm = LLM(
        args.model,
        device="cpu",
        dtype="auto" if word == "packed" else "float32",
        num_threads=args.threads,
        max_model_len=args.window + 8,
        enable_prefix_caching=False,
        enforce_eager=arm is not None,
    )
    if arm is not None:
        round_inputs(llm._engine.runner.model, arm)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]
    starts = range(0, len(ids) - args.window + 1, args.window)
    asked = [{"prompt_token_ids": ids[at : at + args.window]} for at in starts]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    losses = []
    for prompt, output in zip(asked, llm.generate(asked, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        said = zip(prompt["prompt_token_ids"][1:], output.prompt_logprobs[1:], strict=True)
        losses.append([-found[token].logprob for token, found in said])
    return losses


def compared(losses: list[list[float]], base: list[list[float]]) -> dict[str, float]:
    moved = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(losses, base, strict=True)]
    changes = [statistics.fmean(window) for window in moved]
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
    return {
        "change_percent": round(100 * math.expm1(statistics.fmean(changes)), 4),
        "standard_error_percent": round(100 * error, 4),
        "windows_worse": sum(change > 0 for change in changes),
        "token_rms": round(math.sqrt(statistics.fmean(m * m for w in moved for m in w)), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--arms", default="float32,packed")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=12_288)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    words = args.arms.split(",")
    for word in words:
        read_arm(word)
    base: list[list[float]] = []
    for word in words:
        losses = window_losses(args, word)
        base = base or losses
        line = {"what": "perplexity", "model": Path(args.model).name, "arm": word}
        line |= {"perplexity": round(math.exp(statistics.fmean(itertools.chain(*losses))), 4)}
        print(json.dumps(line | {"windows": len(losses)} | compared(losses, base)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
