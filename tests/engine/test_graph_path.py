"""The runner's decode-only path, with a stand-in for captured graphs that runs on a CPU.

`EagerGraphs` does what a graph replay does, padding included: it sees rows and positions only and
returns logits. Red when padding reaches a result, when a row is read through the wrong index, or
when the short path leaves out something the long one delivers.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.build import Engine
from quire.params import SamplingParams
from quire.request import Request
from quire.runner.gather import decode_batches
from quire.runner.graphs import Decoded
from quire.runner.runner import ModelRunner
from quire.runner.trees import Nodes
from tests.hf import VOCAB, tiny_engine, tiny_model

PROMPTS = [[(7 * i + j) % (VOCAB - 3) + 3 for j in range(n)] for i, n in enumerate((3, 9, 14, 22))]


class EagerGraphs:
    """Pads to multiples of four and computes at once."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.num_replays = runner, 0

    def covers(self, num_tokens: int, longest: int) -> bool:
        return True

    def batch_bucket(self, num_tokens: int) -> int:
        return -(-num_tokens // 4) * 4

    def replay(
        self,
        rows: Tensor,
        positions: Tensor,
        longest: int,
        shares_prefix: bool = False,
        nodes: Nodes | None = None,
    ) -> Decoded:
        assert nodes is None, "trees have graphs of their own"
        assert rows.shape[0] % 4 == 0 and int(positions.max()) < longest
        self.num_replays += 1
        runner = self.runner
        lens = positions.numpy().astype(np.int32) + 1
        batches = decode_batches(runner.rows, rows, positions, runner.spec.page_size, lens)
        ctx = runner.planned(batches)
        hidden = runner.model.forward(ctx)
        return Decoded(runner.model.logits(hidden), hidden, ctx.taps.taken() if ctx.taps else ())


def with_graphs(engine: Engine) -> EagerGraphs:
    graphs = EagerGraphs(engine.runner)
    engine.runner.graphs = graphs
    return graphs


def collect(engine: Engine, requests: list[Request]) -> dict[int, dict[int, float]]:
    """Request id -> position -> log-probability of the prompt token after it."""
    found: dict[int, dict[int, float]] = {request.id: {} for request in requests}
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        for event in engine.core.step():
            for position, record in enumerate(event.prompt_logprobs, event.prompt_start):
                found[event.request_id][position] = record.logprob
    return found


def make(id: int, **wishes: object) -> Request:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **wishes})
    return Request.new(id, PROMPTS[id], params, seed=id, arrival=float(id))


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_same_tokens_with_and_without_graphs(overlap: bool) -> None:
    wishes = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 4.0}},
    ]
    results = []
    for use_graphs in (False, True):
        engine = tiny_engine(tiny_model("llama-gqa"), max_num_batched_tokens=9)
        engine.core.lag = int(overlap)
        graphs = with_graphs(engine) if use_graphs else None
        requests = [make(i, **wish) for i, wish in enumerate(wishes)]
        collect(engine, requests)
        results.append([request.output for request in requests])
    assert graphs is not None and graphs.num_replays > 8
    assert results[0] == results[1]


@pytest.mark.parametrize("max_chunk", [1, 2])
def test_prompt_logprobs_of_one_token_chunks(max_chunk: int) -> None:
    """One prompt token beside decodes looks like a decode step; it still owes its logprobs."""
    model = tiny_model("llama-gqa")
    engine = tiny_engine(model, max_chunk=max_chunk)
    with_graphs(engine)
    requests = [make(0), make(3, prompt_logprobs=1)]
    found = collect(engine, requests)
    prompt = PROMPTS[3]
    want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert sorted(found[3]) == list(range(len(prompt) - 1)), "positions without logprobs"
    for position, value in found[3].items():
        assert abs(value - want[position, prompt[position + 1]].item()) < 1e-4


def test_who_had_the_row_before_does_not_decide_on_a_prompts_graph() -> None:
    """Red when a prompt is judged by the wishes of the request that had its row last, or when one
    that wants its hidden states gets a graph, which keeps them inside."""
    asked = []

    class Asked:
        def size_for(self, num_tokens: int, context: int) -> int:
            asked.append(num_tokens)
            return 0

    engine = tiny_engine(tiny_model("llama-gqa"))
    engine.runner.prompt_graphs = Asked()
    for request in (make(1, prompt_logprobs=1), make(2), make(3, prompt_logprobs=1)):
        collect(engine, [request])
    assert [n for n in asked if n > 1] == [len(PROMPTS[2])]
