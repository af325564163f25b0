"""Formats of weights times families of models, and a crowd of requests in which everything meets:
chunked prompts, prefix hits, lost pages, several answers, a grammar, logprobs, draws, drafts."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.kv.groups import PageNeeds
from quire.models.tiny import tiny_model
from quire.params import StructuredOutputsParams
from tests.quant.stored import STORED

AT_LOAD = ("fp8", "int8", "nf4", "mxfp4", "rtn-int4-g32", "rtn-int4-g32-asym", "rtn-int8-g32")
WRITTEN = {  # by `quire quantize` and `quire prune`
    "gptq": ("quantize", "--method", "gptq", "--group-size", "32"),
    "gptq with g_idx": ("quantize", "--method", "gptq", "--group-size", "32", "--no-static-groups"),
    "gptq of 3 bits": ("quantize", "--method", "gptq", "--bits", "3", "--group-size", "32"),
    "awq": ("quantize", "--method", "awq", "--group-size", "32"),
    "smoothquant": ("quantize", "--method", "smoothquant"),
    "fp8 with static inputs": ("quantize", "--method", "fp8", "--static-inputs"),
    "codebook": ("quantize", "--method", "codebook", "--group-size", "32"),
    "nvfp4": ("quantize", "--method", "nvfp4"),
    "2:4": ("prune", "--method", "magnitude", "--pattern", "2:4", "--no-report"),
    "gguf Q4_K": ("quantize", "--method", "gguf", "--type", "Q4_K"),
}
FORMATS = (*AT_LOAD, *WRITTEN, *STORED)
# Dense, windows, experts, latents.
FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v3")
# Formats of a few families alone.
FAMILIES_OF = {
    "gguf Q4_K": ("llama", "gemma", "qwen3_moe"),
    "bitnet": ("bitnet",),
    "gpt-oss's mxfp4": ("gpt_oss",),
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
# The same for kernels that want 256 inputs and more, in whole slabs of 128.
STREAMED = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 256}
RANKS = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 32}  # whole groups of 32
MAX_LEN, CHUNK = 96, 16  # tokens of a request, and of a step in the crowd
# What follows any token that was there before, always.
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "adaptive": False,
}
TEXT = "A quire is four sheets of paper, folded once. " * 30


class Cell(NamedTuple):
    form: str
    family: str
    drafts: bool


def chosen() -> list[Cell]:
    """Every format with its first family and one other in turns, one of them with drafts; all
    pairs in the long tier, with drafts and without."""
    if os.environ.get("QUIRE_LONG_TESTS"):
        return [
            Cell(form, family, drafts)
            for form in FORMATS
            for family in FAMILIES_OF.get(form, FAMILIES)
            for drafts in (False, True)
        ]
    cells = []
    for i, form in enumerate(FORMATS):
        first, *others = FAMILIES_OF.get(form, FAMILIES)
        cells.append(Cell(form, first, i % 2 == 0 or not others))
        if others:
            cells.append(Cell(form, others[i % len(others)], i % 2 == 1))
    return sorted(cells)


def folder_of(
    form: str, family: str, scratch: Path, sizes: dict[str, int] = WIDE
) -> tuple[Path, dict[str, Any]]:
    """A model in this format, and how to load it."""
    wide = sizes | (RANKS if family.startswith("deepseek") else {})
    plain = tiny_model(family, scratch / "plain", seed=5, **wide)
    if form in AT_LOAD:
        return plain, {"quantization": form}
    if form in STORED:
        STORED[form](plain)
        return plain, {}
    out, text = scratch / "out", scratch / "text"
    text.write_text(TEXT)
    verb, *words = WRITTEN[form]
    words += ["--calibration", str(text), "--samples", "4", "--length", "32", "--device", "cpu"]
    assert main([verb, str(plain), *words, "--out", str(out), "--json", "--no-report"]) == 0
    return next(out.glob("*.gguf"), out), {}


def engine(folder: Path, **changes: Any) -> LLM:
    fixed = {"page_size": 4, "max_model_len": MAX_LEN, "num_threads": 1, "kv_cache_memory": 1 << 22}
    return LLM(str(folder), **{**fixed, **changes})


def crowd() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    shared = [rng.randint(5, 250) for _ in range(24)]
    grammar = StructuredOutputsParams(regex="[a-f]{12}x")
    wishes = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.9, top_p=0.9, seed=11, logprobs=1),
        SamplingParams(temperature=1.0, seed=12, n=2),
        SamplingParams(temperature=0.0, structured_outputs=grammar),
        SamplingParams(temperature=0.7, seed=13, repetition_penalty=1.2, prompt_logprobs=1),
        SamplingParams(temperature=0.0),
    ]
    return [
        (
            shared[: 24 if number % 2 else 8] + [rng.randint(5, 250) for _ in range(6 * number)],
            wish.with_(max_tokens=14, ignore_eos=True),
        )
        for number, wish in enumerate(wishes)
    ]


def check(folder: Path, drafts: bool = False, **how: Any) -> LLM:
    """Each request alone, read in one go in an engine with room for everything, against all of
    them at once where they are read in chunks and there is no room, and with `drafts` guesses are
    verified. Returns that engine."""
    requests = crowd()
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [wish for _, wish in requests]
    alone = engine(folder, enable_prefix_caching=False, **how)
    wanted = [
        alone.generate([prompt], [wish], False)[0]
        for prompt, wish in zip(prompts, params, strict=True)
    ]
    pool = alone._engine.runner.pool
    num_tokens = 112 if drafts else 144  # with guesses that hold, requests end sooner
    if len(pool.groups) > 1:  # windows are groups
        num_tokens = 240
    size = pool.cache.page_size
    one_request = PageNeeds(size, pool.groups.windows, max_inflight=2 * CHUNK).of(MAX_LEN) + 1
    room = max(num_tokens // size, one_request) * pool.cache.page_bytes
    tight = {"max_num_batched_tokens": CHUNK, "kv_cache_memory": room, "max_num_seqs": 6}
    small = engine(folder, speculative_config=DRAFTS if drafts else None, **tight, **how)
    is_guessed = False
    for _ in range(2):  # the second time prompts are found in the cache
        found = small.generate(prompts, params, False)
        for got, want, wish in zip(found, wanted, params, strict=True):
            assert got.outputs == want.outputs, wish
            assert got.prompt_logprobs == want.prompt_logprobs, wish
            if wish.structured_outputs is None:  # what a grammar forces is always drafted
                is_guessed |= got.metrics.num_drafted_tokens > 0
    assert small.stats().num_preempted > 0, "the pool is too large to lose a page"
    assert is_guessed == drafts, "nothing was guessed, or all by itself"
    assert any(out.num_cached_tokens for out in found), "no prefix was found"
    return small
