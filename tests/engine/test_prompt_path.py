"""The runner's path for a lone short prompt, with a stand-in for captured graphs.

`EagerPrompts` sees what a replay sees, the padded upload and a bound, and computes at once; the
Triton kernels run in the interpreter. Red when padding reaches a result or a page of somebody
else's, or when the plan on the device leaves out a tile.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tests.interpreter  # noqa: F401  mends the interpreter for this NumPy
from quire.attn.triton import TritonAttention
from quire.kernels.paged_tile import Launch, PagedConfig
from quire.memory.pool import PagePool
from quire.params import SamplingParams
from quire.runner.captured import prompt_logits
from quire.runner.prompt_graphs import STAGED, Inputs
from quire.runner.rows import RequestRows
from quire.runner.runner import ModelRunner
from quire.runner.warmup import _step
from tests.hf import tiny_engine, tiny_model

TILES = PagedConfig(16, 32, Launch(16, 4, 2), Launch(16, 4, 2))
MAX_LEN = 96


class EagerPrompts:
    def __init__(self, runner: ModelRunner, size: int) -> None:
        self.runner, self.size, self.num_replays = runner, size, 0

    def size_for(self, num_tokens: int, context: int) -> int:
        return self.size

    def replay(self, sent: Inputs, context: int) -> Tensor:
        self.num_replays += 1
        assert len(sent["positions"]) == self.size and context <= MAX_LEN
        return prompt_logits(self.runner, {name: sent[name] for name in STAGED}, MAX_LEN)


def seen_by_sampler(runner: ModelRunner) -> list[Tensor]:
    """Logits of each step from now on."""
    seen: list[Tensor] = []
    sampler = runner.sampler

    def spy(logits: Tensor, inputs: object) -> object:
        seen.append(logits.clone())
        return sampler(logits, inputs)

    runner.sampler = spy
    return seen


def logits_of(family: str, num_tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """Logits after a prompt, padded to `size` unless that is 0, and the pages it left."""
    plain = tiny_engine(tiny_model(family)).runner
    model, heads, groups = plain.model, plain.spec, plain.pool.groups
    backend = TritonAttention(torch.float32, TILES)
    plan, num_pages = _step(model, heads.page_size, 1, num_tokens, SamplingParams(temperature=0.0))
    rows = RequestRows(2, MAX_LEN, -(-MAX_LEN // heads.page_size), model.device, len(groups))
    pool = PagePool(backend, heads, plain.pool.cache, num_pages, model.device)
    runner = ModelRunner(model, backend, heads, pool, rows, use_graphs=False)
    tokens = [(5 * i) % 90 + 3 for i in range(num_tokens)]
    admission = plan.admissions[0]
    plan = type(plan)(plan.works, (admission._replace(tokens=tokens),), plan.page_writes)
    seen = seen_by_sampler(runner)
    if size:
        runner.prompt_graphs = EagerPrompts(runner, size)
    runner.execute(plan).result()
    assert not size or runner.prompt_graphs.num_replays == 1
    return seen[0], pool.data[:, :, 1:].clone()  # page 0 is where padding goes


@pytest.mark.parametrize("family, num_tokens", [("llama-gqa", 24), ("gemma2", 19)])
def test_a_padded_prompt_has_the_bits_of_the_plain_one(family: str, num_tokens: int) -> None:
    """gemma2 has windows, which make two layer groups, and soft caps."""
    want, pages = logits_of(family, num_tokens, 0)
    got, padded_pages = logits_of(family, num_tokens, 24)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(padded_pages, pages, rtol=0, atol=1e-6)
