"""transformers in fp32: static batches, padded on the left and run to the longest answer, which is
how `generate` is used. It reads a folder with our own numbers (`hf_export.py`)."""

from __future__ import annotations

import time

from quire.bench.cpu.work import Prompts, Setup


class TransformersPeer:
    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup.threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=torch.float32, attn_implementation="sdpa"
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


def open_peer(setup: Setup) -> TransformersPeer:
    return TransformersPeer(setup)
