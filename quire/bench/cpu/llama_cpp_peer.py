"""llama.cpp through the C functions that llama-cpp-python binds.

Its Python class `Llama` has no batches of requests and spends time on samplers; here a step is one
`llama_decode` of a token for every request, as in llama-bench, and the largest logit is the next
token. Each request has its own stream of the cache. Weights are repacked where llama.cpp does so
by itself, and flash attention is its own choice.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from quire.bench.cpu.work import Prompts, Setup

MAX_BATCH = 2048  # tokens of one call; llama.cpp cuts it in pieces of 512, as it does by default


class Fed(NamedTuple):
    """One token on its way in; the last of a prompt wants an answer."""

    sequence: int
    position: int
    token: int
    wants_next: bool


class LlamaCppPeer:
    def __init__(self, setup: Setup) -> None:
        import llama_cpp as api
        import numpy as np

        self.api, self.np = api, np
        self._silence = api.llama_log_callback(lambda level, text, data: None)  # kept alive
        api.llama_log_set(self._silence, None)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(
            setup.model.encode(), api.llama_model_default_params()
        )
        assert self.model, f"llama.cpp cannot load {setup.model}"
        params = api.llama_context_default_params()
        params.n_ctx = setup.context * setup.num_seqs
        params.n_batch = MAX_BATCH
        params.n_seq_max = setup.num_seqs
        params.n_threads = params.n_threads_batch = setup.threads
        self.context = api.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp cannot make a context"
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(MAX_BATCH, 0, 1)

    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        start = time.perf_counter()
        nexts = self._feed(
            [
                Fed(sequence, position, token, position == len(prompt) - 1)
                for sequence, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ]
        )
        for made in range(1, max(lengths)):
            live = [s for s, length in enumerate(lengths) if made < length]
            fed = [Fed(s, len(prompts[s]) + made - 1, nexts[s], True) for s in live]
            nexts |= self._feed(fed)
        return time.perf_counter() - start

    def _feed(self, tokens: list[Fed]) -> dict[int, int]:
        """The next token of each sequence that wants one."""
        found: dict[int, int] = {}
        for first in range(0, len(tokens), MAX_BATCH):
            part = tokens[first : first + MAX_BATCH]
            self._fill(part)
            status = self.api.llama_decode(self.context, self.batch)
            assert status == 0, f"llama_decode gave {status}"
            for index, fed in enumerate(part):
                if fed.wants_next:
                    found[fed.sequence] = self._largest(index)
        return found

    def _fill(self, tokens: list[Fed]) -> None:
        batch: Any = self.batch
        batch.n_tokens = len(tokens)
        for index, fed in enumerate(tokens):
            batch.token[index] = fed.token
            batch.pos[index] = fed.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = fed.sequence
            batch.logits[index] = fed.wants_next

    def _largest(self, index: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, index)
        return int(self.np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


def open_peer(setup: Setup) -> LlamaCppPeer:
    return LlamaCppPeer(setup)
