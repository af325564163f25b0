"""OpenVINO GenAI's continuous batching on its CPU plugin.

It reads a GGUF file of some architectures and formats, or, faster and for all others, a folder that
optimum-intel converted: `--model-of openvino=FOLDER`.
"""

from __future__ import annotations

import time
from typing import Any

from quire.bench.cpu.work import Prompts, Setup

CACHE_GIB = 1


class OpenVinoPeer:
    def __init__(self, setup: Setup) -> None:
        import numpy as np
        import openvino
        import openvino_genai as genai

        self.np, self.openvino, self.genai = np, openvino, genai
        plan = genai.SchedulerConfig()
        plan.cache_size = CACHE_GIB
        plan.max_num_seqs = setup.num_seqs
        # One prompt goes in at once; among others it is cut, which was the faster way.
        plan.max_num_batched_tokens = 1024 if setup.num_seqs == 1 else 512
        plan.dynamic_split_fuse = True
        plan.enable_prefix_caching = False
        options = {"INFERENCE_NUM_THREADS": setup.threads, "ENABLE_CPU_PINNING": False}
        self.pipeline = genai.ContinuousBatchingPipeline(setup.model, plan, "CPU", options)

    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        tensors = [
            self.openvino.Tensor(self.np.array([prompt], dtype=self.np.int64)) for prompt in prompts
        ]
        asked = [self._greedy(length) for length in lengths]
        start = time.perf_counter()
        results = self.pipeline.generate(tensors, asked)
        seconds = time.perf_counter() - start
        made = [len(result.m_generation_ids[0]) for result in results]
        assert made == lengths, f"asked for {lengths} tokens, got {made}"
        return seconds

    def _greedy(self, length: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = length
        config.ignore_eos = True
        config.do_sample = False
        return config


def open_peer(setup: Setup) -> OpenVinoPeer:
    return OpenVinoPeer(setup)
