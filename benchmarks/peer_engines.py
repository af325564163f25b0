"""One measured engine in one process: what `cpu_peers.py` starts for each measurement.

    python benchmarks/peer_engines.py PEER MEASUREMENT '{"model": ..., sizes}'

Every peer offers `generate(prompts, lengths) -> seconds`; the measurements are written once against
that. Greedy, end of sequence ignored, token ids in. Prints one JSON line.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work; `cpu_peers.py --quick` shrinks everything."""

    threads: int = 2
    decode_prompt: int = 128
    decode_output: int = 128
    prefill: int = 1024
    requests: int = 32
    prompt_low: int = 64
    prompt_high: int = 256
    output_low: int = 64
    output_high: int = 128
    context: int = 1000  # of the cache-or-none measurement
    skew_rows: int = 8


class Peer(Protocol):
    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        """Seconds to make exactly so many tokens of each prompt."""
        ...


class QuirePeer:
    dtype = "float32"  # the reference mode: weights are expanded

    def __init__(self, model: str, sizes: Sizes, **options: Any) -> None:
        from quire import LLM

        defaults: dict[str, Any] = {
            "max_num_seqs": 32,
            "max_model_len": 2048,
            "kv_cache_memory": 2 << 30,
            "enable_prefix_caching": False,
        }
        self.llm = LLM(
            model,
            device="cpu",
            dtype=self.dtype,
            skip_tokenizer_init=True,
            num_threads=sizes.threads,
            **(defaults | options),
        )

    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        from quire import SamplingParams

        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
        items = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(items, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
        return seconds


class PackedQuirePeer(QuirePeer):
    dtype = "auto"  # as users run it: weights as the file holds them


class TransformersPeer:
    """Static batches, padded on the left, run to the longest answer: `generate` as most use it."""

    def __init__(self, model: str, sizes: Sizes) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(sizes.threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        width, longest = max(map(len, prompts)), max(lengths)
        ids = self.torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = self.torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        start = time.perf_counter()
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
        assert out.shape[1] == width + longest
        return seconds


class VllmPeer:
    def __init__(self, model: str, sizes: Sizes) -> None:
        from vllm import LLM

        self.llm = LLM(
            model,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=32,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start


PEERS: dict[str, Callable[..., Peer]] = {
    "quire": QuirePeer,
    "quire-packed": PackedQuirePeer,
    "transformers": TransformersPeer,
    "vllm": VllmPeer,
}


class Prompter:
    """Fresh random prompts, so that no cache helps by accident; the same ones for every peer."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __call__(self, length: int) -> list[int]:
        return [self.rng.randrange(300, 40_000) for _ in range(length)]


# ---------------------------------------------------------------- measurements of any peer


def decode(peer: Peer, sizes: Sizes, prompt: Prompter) -> dict[str, float]:
    """Batch 1: (N - 1) / (T(N) - T(1))."""
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


# ---------------------------------------------------------------- inside our engine


def batching(model: str, sizes: Sizes, prompt: Prompter) -> dict[str, float]:
    """Skewed lengths on few rows: refill a row when it is free, or wait for the whole batch."""
    rows = sizes.skew_rows
    peer = QuirePeer(model, sizes, max_num_seqs=rows)
    long, short = sizes.output_high, max(1, sizes.output_low // 8)
    lengths = [long if i % rows == 0 else short for i in range(sizes.requests)]
    prompts = [prompt(sizes.prompt_low) for _ in lengths]
    peer.generate(prompts[:2], [4, 4])
    continuous = peer.generate(prompts, lengths)
    static = sum(
        peer.generate(prompts[i : i + rows], lengths[i : i + rows])
        for i in range(0, len(prompts), rows)
    )
    total = sum(lengths)
    return {"continuous_tok_s": total / continuous, "static_tok_s": total / static}


def prefix(model: str, sizes: Sizes, prompt: Prompter) -> dict[str, float]:
    """The same prompt twice: computed, then served from the prefix cache."""
    peer = QuirePeer(model, sizes, enable_prefix_caching=True)
    peer.generate([prompt(sizes.prefill)], [1])
    asked = prompt(sizes.prefill)
    miss = peer.generate([asked], [1])
    hit = min(peer.generate([asked], [1]) for _ in range(3))
    return {"miss_ttft_s": miss, "hit_ttft_s": hit}


def cache(model: str, sizes: Sizes, prompt: Prompter) -> dict[str, float]:
    """One more token at a long context: with its keys and values kept, or computed again."""
    peer = QuirePeer(model, sizes)
    peer.generate([prompt(sizes.context)], [2])
    again = min(peer.generate([prompt(sizes.context)], [1]) for _ in range(2))
    more = 17
    kept = (peer.generate([prompt(sizes.context)], [more]) - again) / (more - 1)
    return {"cached_s": kept, "recomputed_s": again}


ANY_PEER = {"decode": decode, "prefill": prefill, "throughput": throughput}
OURS = {"batching": batching, "prefix": prefix, "cache": cache}


def main() -> None:
    name, what, text = sys.argv[1:4]
    options = json.loads(text)
    model, seed = options.pop("model"), options.pop("seed", 1)
    sizes = Sizes(**options)
    if what == "cold":
        # As a user would start it: nothing tuned. The parent knows when this process began.
        plain = {"max_model_len": None, "kv_cache_memory": None} if name == "quire" else {}
        PEERS[name](model, sizes, **plain).generate([list(range(1, 17))], [1])
        record = {"first_token_at": time.time()}
    elif what in OURS:
        record = OURS[what](model, sizes, Prompter(seed))
    else:
        record = ANY_PEER[what](PEERS[name](model, sizes), sizes, Prompter(seed))
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
