"""Reading prompts in the engine: each position's hidden state, and the token that follows it.

Everything that is judged here (perplexity, divergence, choices) is a function of the two. They go
through the same steps as any request's: batched, in chunks, in whatever form the weights and the
cache have. Logits are made a few positions at a time, so a vocabulary times a window never exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quire.engine.build import ends_of
from quire.errors import EngineDead
from quire.llm import LLM
from quire.models.decoder import Decoder
from quire.params import SamplingParams
from quire.progress import progress_bar
from quire.request import RequestId

# Which prompt, its first position here, hidden states [positions, hidden] and the tokens that
# follow [positions]. A position that is computed again, after a preemption, comes again.
Reader = Callable[[int, int, Tensor, Tensor], None]

LOGITS_AT_ONCE = 1 << 23


def read_prompts(llm: LLM, prompts: Sequence[Sequence[int]], read: Reader, label: str) -> None:
    """`read` sees every position of every prompt but its last."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    asked = [llm._conversation({"prompt_token_ids": list(p)}, params, 0) for p in prompts]
    number = {conversation.leader.id: i for i, conversation in enumerate(asked)}

    def take(request: RequestId, start: int, hidden: Tensor, targets: Tensor) -> None:
        read(number[request], start, hidden, targets)

    runner = llm._engine.runner
    runner.give_prompts(take)
    try:
        with progress_bar(label, len(asked)) as advance:
            llm._loop.run(asked, advance)
    finally:
        runner.give_prompts(None)
    for conversation in asked:
        output = conversation.result().outputs[0]
        if output.finish_reason == "error":
            raise EngineDead(f"a prompt could not be scored: {output.stop_reason}")


def output_of(llm: LLM) -> Decoder:
    """What makes logits of hidden states here, whole: other ranks have no part in judging."""
    return ends_of(llm.args, llm._engine.runner.model)


def pieces(num_positions: int, vocab_size: int) -> Iterator[slice]:
    """Runs of positions whose logits may exist at once."""
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    return (slice(at, at + size) for at in range(0, num_positions, size))


def log_softmax(logits: Tensor) -> Tensor:
    """In fp64: differences of two models are smaller than what fp32 sums lose."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float64)
