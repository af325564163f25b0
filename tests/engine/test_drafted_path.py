"""Steps with drafts as graphs take them, with the Triton kernels in the interpreter.

`EagerDecodes` computes at once what a graph of few tokens captures. Red when a draft does not see
those before it, when padding reaches a result, or when bits are not those of one token a step.
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
from quire.request import RequestId
from quire.runner.captured import decoded
from quire.runner.graphs import Decoded
from quire.runner.rows import RequestRows
from quire.runner.runner import ModelRunner
from quire.runner.trees import Nodes
from quire.step import Admission, PageWrite, StepPlan, Work
from tests.engine.test_prompt_path import seen_by_sampler
from tests.hf import tiny_engine, tiny_model

TILES = PagedConfig(16, 16, Launch(16, 4, 2), Launch(16, 4, 2))
MAX_LEN, MAX_ROWS = 32, 2
PROMPTS = (14, 3)  # tokens; drafts of the first lie on both sides of a tile's border
PARAMS = SamplingParams(temperature=0.0, max_tokens=16)


class EagerDecodes:
    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.sizes = runner, []

    def covers(self, num_tokens: int, longest: int) -> bool:
        return longest <= MAX_LEN

    def batch_bucket(self, num_tokens: int) -> int:
        return num_tokens + 2

    def replay(
        self,
        rows: Tensor,
        positions: Tensor,
        longest: int,
        shares_prefix: bool,
        nodes: Nodes | None = None,
    ) -> Decoded:
        self.sizes.append(len(rows))
        return decoded(self.runner, rows, positions, MAX_LEN, shares_prefix, nodes)


def runner_of(family: str) -> ModelRunner:
    plain = tiny_engine(tiny_model(family)).runner
    model, heads, groups = plain.model, plain.spec, plain.pool.groups
    backend = TritonAttention(torch.float32, TILES)
    rows = RequestRows(MAX_ROWS, MAX_LEN, -(-MAX_LEN // heads.page_size), model.device, len(groups))
    num_pages = 1 + len(groups) * MAX_ROWS * rows.max_pages
    pool = PagePool(backend, heads, plain.pool.cache, num_pages, model.device)
    return ModelRunner(model, backend, heads, pool, rows, use_graphs=False)


def admitted(runner: ModelRunner) -> StepPlan:
    """All prompts, read whole."""
    pages, groups = runner.rows.max_pages, len(runner.pool.groups)
    admissions, works, writes = [], [], []
    for row, length in enumerate(PROMPTS):
        tokens = [(5 * i + 3 * row) % 90 + 3 for i in range(length)]
        admissions.append(Admission(RequestId(row), row, tokens, length, PARAMS, row, ()))
        works.append(Work(RequestId(row), row, 0, length, True))
        for group in range(groups):
            first = 1 + (group * MAX_ROWS + row) * pages
            writes += [PageWrite(row, i, first + i, group) for i in range(pages)]
    return StepPlan(tuple(works), tuple(admissions), tuple(writes))


def one_by_one(runner: ModelRunner, num: int) -> list[list[int]]:
    """What each request draws next, a token a step."""
    drawn: list[list[int]] = [[] for _ in PROMPTS]
    for step in range(num):
        works = [Work(RequestId(r), r, n + step, 1, True) for r, n in enumerate(PROMPTS)]
        result = runner.execute(StepPlan(tuple(works))).result()
        for row, tokens in enumerate(result.sampled):
            drawn[row] += tokens
    return drawn


def test_the_bits_of_drafts_are_those_of_decodes() -> None:
    """gemma2 has windows, which make two layer groups, and soft caps."""
    plain, drafted = runner_of("gemma2"), runner_of("gemma2")
    for runner in (plain, drafted):
        runner.execute(admitted(runner)).result()
    slow = seen_by_sampler(plain)
    drawn = one_by_one(plain, 2)
    fast = seen_by_sampler(drafted)
    drafted.graphs = graphs = EagerDecodes(drafted)
    wrong = drawn[0][1] + 1
    drafts = {0: (drawn[0][0], wrong), 1: (drawn[1][0],)}
    works = tuple(
        Work(RequestId(r), r, PROMPTS[r], 1 + len(own), True, len(own), own)
        for r, own in drafts.items()
    )
    result = drafted.execute(StepPlan(works)).result()
    assert graphs.sizes == [3 + 2 + 2]
    assert [list(tokens) for tokens in result.sampled] == [drawn[0][:2], drawn[1][:2]]
    for at, (step, row) in {0: (0, 0), 1: (1, 0), 3: (0, 1), 4: (1, 1)}.items():
        assert torch.equal(fast[0][at], slow[step][row])


@pytest.mark.parametrize("has_graphs", [True, False])
def test_the_bits_of_trees_are_those_of_decodes(has_graphs: bool) -> None:
    """Red when what was right is not found, or is left where the tree had it, in either group."""
    plain, drafted = runner_of("gemma2"), runner_of("gemma2")
    for runner in (plain, drafted):
        runner.execute(admitted(runner)).result()
    slow = seen_by_sampler(plain)
    drawn = one_by_one(plain, 5)
    fast = seen_by_sampler(drafted)
    if has_graphs:
        drafted.graphs = EagerDecodes(drafted)
    first, second = drawn
    drafts = {
        0: (first[0] + 1, first[0], first[1], 3, first[2]),
        1: (second[0], second[0] + 1),
    }
    parents = {0: (0, 0, 2, 1, 3), 1: (0, 0)}
    works = tuple(
        Work(RequestId(r), r, PROMPTS[r], 1 + len(own), True, len(own), own, parents[r])
        for r, own in drafts.items()
    )
    result = drafted.execute(StepPlan(works)).result()
    assert [list(tokens) for tokens in result.sampled] == [first[:4], second[:2]]
    for at, (step, row) in {0: (0, 0), 2: (1, 0), 3: (2, 0), 5: (3, 0), 6: (0, 1)}.items():
        assert torch.equal(fast[0][at], slow[step][row])
    works = tuple(Work(RequestId(r), r, n + 4 - 2 * r, 1, True) for r, n in enumerate(PROMPTS))
    result = drafted.execute(StepPlan(works)).result()
    assert [list(tokens) for tokens in result.sampled] == [[first[4]], [second[2]]]
    assert torch.equal(fast[1][0], slow[4][0]) and torch.equal(fast[1][1], slow[2][1])
