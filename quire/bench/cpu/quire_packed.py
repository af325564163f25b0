"""Quire as users run it: weights stay in the numbers that the file holds."""

from __future__ import annotations

import time

from quire.bench.cpu.work import Prompts, Setup
from quire.bench.offline import greedy
from quire.llm import LLM


class QuirePeer:
    def __init__(self, setup: Setup, dtype: str) -> None:
        self.llm = LLM(
            setup.model,
            device="cpu",
            dtype=dtype,
            skip_tokenizer_init=True,
            num_threads=setup.threads,
            max_num_seqs=setup.num_seqs,
            max_model_len=setup.context,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        items = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [greedy(length) for length in lengths]
        start = time.perf_counter()
        outputs = self.llm.generate(items, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
        return seconds


def open_peer(setup: Setup) -> QuirePeer:
    return QuirePeer(setup, "auto")
