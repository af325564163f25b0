"""What a cache in another form costs: perplexity of a text, and seconds of a decode.

    python benchmarks/kv_cache.py quality --text FILE --window 4096 --tokens 16384
    python benchmarks/kv_cache.py speed --contexts 512,4096,8192

`quality` compares every form with the first one, token by token;
`int4-plain` is int4 without its rotation. `speed` decodes one request behind contexts of random
tokens and prints the median time of a step, rounds of all forms taking turns. One JSON line each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from quire import LLM, SamplingParams
from quire.kv import forms

STEPS = 24  # of a timed round
SPAN = 256  # tokens whose mean change counts as one: neighbours are not independent


def engine(args: argparse.Namespace, form: str, max_len: int) -> LLM:
    forms.CODED["int4"] = replace(forms.INT4, rotates=form != "int4-plain")
    return LLM(
        args.model,
        device="cpu",
        num_threads=args.threads,
        max_model_len=max_len,
        enable_prefix_caching=args.what == "speed",
        kv_cache_dtype=form.removesuffix("-plain"),
    )


def window_losses(args: argparse.Namespace, form: str) -> list[list[float]]:
    """Negative logarithms of each window's tokens but the first."""
    llm = engine(args, form, args.window + 1)  # a token is drawn behind each
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
    """The error is that of spans of tokens, so that one long window has one too."""
    moved = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(losses, base, strict=True)]
    spans = [window[at : at + SPAN] for window in moved for at in range(0, len(window), SPAN)]
    changes = [statistics.fmean(span) for span in spans]
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
    return {
        "change_percent": round(100 * math.expm1(statistics.fmean(itertools.chain(*moved))), 4),
        "standard_error_percent": round(100 * error, 4),
        "windows_worse": sum(statistics.fmean(window) > 0 for window in moved),
    }


def quality(args: argparse.Namespace) -> None:
    base: list[list[float]] = []
    for form in args.forms.split(","):
        losses = window_losses(args, form)
        base = base or losses
        line = {"what": "perplexity", "model": Path(args.model).name, "kv_cache_dtype": form}
        line |= {"window": args.window, "windows": len(losses)}
        line |= {"perplexity": round(math.exp(statistics.fmean(itertools.chain(*losses))), 4)}
        print(json.dumps(line | compared(losses, base)), flush=True)


def speed(args: argparse.Namespace) -> None:
    contexts = [int(word) for word in args.contexts.split(",")]
    words = args.forms.split(",")
    engines = {form: engine(args, form, max(contexts) + 4 * STEPS) for form in words}
    draw = random.Random(0)
    prompts = {n: [draw.randrange(1000, 20000) for _ in range(n)] for n in contexts}
    times: dict[tuple[str, int], list[float]] = {}
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    for _, context, form in itertools.product(range(args.rounds + 1), contexts, words):
        marks = []
        for _event in engines[form].stream({"prompt_token_ids": prompts[context]}, params):
            marks.append(time.perf_counter())
        steps = [b - a for a, b in itertools.pairwise(marks)][1:]
        times.setdefault((form, context), []).append(statistics.median(steps))
    for (form, context), found in times.items():
        line = {"what": "decode", "model": Path(args.model).name, "kv_cache_dtype": form}
        line |= {"context": context, "ms": round(1e3 * min(found[1:]), 3)}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("quality", "speed"))
    parser.add_argument("--model", default="default")
    parser.add_argument("--forms", default="auto,int8,fp8,int4,int4-plain")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--contexts", default="512,4096,8192")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.what == "quality" and args.text is None:
        parser.error("quality needs --text")
    quality(args) if args.what == "quality" else speed(args)


if __name__ == "__main__":
    sys.exit(main())
