"""The compiled draw on a real GPU: same bits in any batch, no waiting, and the odds are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.sample.cuda_ops import CudaSampling
from quire.sample.inputs import BadWords, History, Penalties, SampleInputs, TokenEdits
from quire.sample.sampler import Sampler
from tests.sample.cases import Row, chi_square, exact_probabilities, make_inputs, to_device

FILTERS = [
    Row(0.0),
    Row(1.0),
    Row(0.7),
    Row(0.8, top_k=50),
    Row(0.8, top_p=0.95),
    Row(1.3, min_p=0.05),
    Row(1.0, top_k=5000, top_p=0.8),
    Row(1.0, top_k=60, top_p=0.7, min_p=0.02),
    Row(2.0, top_p=0.999),
    Row(1.0, top_k=1),
]
SHAPES = [("normal", 151_936), ("ties", 49_152), ("flat", 32_001), ("normal", 262_144)]


def _case(kind: str, vocab_size: int, copies: int) -> tuple[torch.Tensor, list[Row]]:
    rows = [
        replace(row, seed=i * 31 - 5, position=i * copies + c)
        for c in range(copies)
        for i, row in enumerate(FILTERS)
    ]
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "flat":
        logits = logits * 0.01
    return logits.cuda(), rows


def _draw(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    return Sampler(CudaSampling())(logits, to_device(make_inputs(rows), "cuda")).tokens


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("kind", "vocab_size"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_see_each_other(kind: str, vocab_size: int, dtype: torch.dtype) -> None:
    logits, rows = _case(kind, vocab_size, copies=4)
    logits = logits.to(dtype)
    whole = _draw(logits, rows)
    for _ in range(3):  # atomics land in another order each time
        assert torch.equal(_draw(logits, rows), whole)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    mixed = _draw(logits[order.cuda()], [rows[i] for i in order.tolist()])
    assert torch.equal(mixed, whole[order.cuda()])
    alone = [_draw(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    assert torch.equal(torch.cat(alone), whole)
    if dtype == torch.bfloat16:  # a neighbour's penalties turn the batch into f32
        assert torch.equal(_draw(logits.float(), rows), whole)


@pytest.mark.parametrize(("kind", "vocab_size"), SHAPES)
def test_agrees_with_the_cpu(kind: str, vocab_size: int) -> None:
    """But for rounding at an edge or between two near-equal arrivals: a row in a hundred."""
    logits, rows = _case(kind, vocab_size, copies=12)
    want = Sampler()(logits.cpu(), make_inputs(rows)).tokens
    wrong = (_draw(logits, rows).cpu() != want).sum()
    assert int(wrong) <= len(rows) // 100


@pytest.mark.parametrize("row", FILTERS[1:8], ids=str)
def test_draws_follow_the_exact_distribution(row: Row) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
    rows = [replace(row, seed=i % 7, position=i) for i in range(20_000)]
    draws = _draw(logits.cuda().expand(len(rows), -1).contiguous(), rows).cpu().numpy()
    counts = np.bincount(draws, minlength=50)
    assert abs(chi_square(counts, exact_probabilities(logits, row))) < 4.0


def _everything(rows: list[Row], vocab_size: int) -> SampleInputs:
    """Inputs that use every feature at once."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cuda")

    size = len(rows)
    tokens = torch.randint(0, vocab_size, (size, 64), device="cuda")
    lens = torch.randint(1, 64, (size,), device="cuda")
    ones = torch.ones(size, device="cuda")
    return replace(
        to_device(make_inputs(rows, num_logprobs=20), "cuda"),
        history=History(tokens, lens // 2, lens),
        penalties=Penalties(1.2 * ones, 0.1 * ones, 0.2 * ones),
        edits=TokenEdits(
            bias_rows=ints(0, 1), bias_tokens=ints(5, 6), bias_values=ones[:2],
            banned_rows=ints(2), banned_tokens=ints(9),
            allowed_rows=ints(3, 3), allowed_tokens=ints(1, 2),
        ),
        bad_words=BadWords(ints(0, 4), ints(-1, 3, 4, 5).view(2, 2), ints(8, 9)),
    )  # fmt: skip


def test_never_waits() -> None:
    logits, rows = _case("normal", 32_000, copies=1)
    sampler, inputs = Sampler(CudaSampling()), _everything(rows, 32_000)
    want = sampler(logits.clone(), inputs)  # compiles, which may wait
    copy = logits.clone()
    with _no_sync():
        out = sampler(copy, inputs)
    assert torch.equal(out.tokens, want.tokens)
    assert int(out.tokens[3]) in (1, 2)


@pytest.mark.parametrize("with_edits", [False, True])
def test_can_be_captured(with_edits: bool) -> None:
    logits, rows = _case("normal", 32_000, copies=1)
    sampler = Sampler(CudaSampling())
    inputs = to_device(make_inputs(rows), "cuda")
    if with_edits:
        inputs = _everything(rows, 32_000)
    want = sampler(logits.clone(), inputs).tokens
    static = logits.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sampler(static.clone(), inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler(static.clone(), inputs).tokens
    for _ in range(2):
        graph.replay()
        assert torch.equal(tokens, want)


def test_edits_match_the_cpu() -> None:
    logits, rows = _case("normal", 32_000, copies=1)
    inputs = _everything(rows, 32_000)
    out = Sampler(CudaSampling())(logits.clone(), inputs)

    def to_cpu(part: object) -> object:
        names = type(part).__slots__
        return type(part)(*(getattr(part, name).cpu() for name in names))

    parts = ("history", "penalties", "edits", "bad_words")
    moved = replace(inputs, **{name: to_cpu(getattr(inputs, name)) for name in parts})
    want = Sampler()(logits.cpu(), to_device(moved, "cpu"))
    assert torch.equal(out.tokens.cpu(), want.tokens)
    assert out.logprobs is not None
    assert want.logprobs is not None
    assert torch.equal(out.logprobs.top_tokens.cpu(), want.logprobs.top_tokens)
    torch.testing.assert_close(out.logprobs.top_values.cpu(), want.logprobs.top_values)
    assert torch.equal(out.logprobs.chosen_rank.cpu(), want.logprobs.chosen_rank)
