"""The fused draw in Triton's interpreter: it must pick what the CPU path picks, row by row.

Both paths share the noise, so equal tokens over many seeds mean equal survivors. What only a
compiler can break (registers, atomics, timing) is `tests/gpu/test_sample_gpu.py`.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_quire_index"):
        # The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer takes
        # as loop bounds.
        patch_tensor = interpreter._patch_lang_tensor

        def _patch_with_index(tensor, scope):
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = _patch_with_index
        interpreter._quire_index = True

import triton
import triton.language as tl

from quire.kernels import sample as kernel
from quire.kernels.sample_race import log_times
from quire.sample.gumbel import TokenNoise, row_keys
from quire.sample.inputs import SampleInputs
from quire.sample.sampler import Sampler
from tests.sample.cases import Row, make_inputs, to_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
FILTERS = [
    Row(0.8, top_k=5),
    Row(0.8, top_p=0.9),
    Row(1.3, min_p=0.05),
    Row(1.0, top_k=40, top_p=0.8),
    Row(1.0, top_k=60, top_p=0.7, min_p=0.02),
    Row(1.0, top_p=0.95, min_p=0.01),
    Row(2.0, top_p=0.999),
    Row(1.0, top_k=1),
]


def _draw(logits: Tensor, inputs: SampleInputs) -> Tensor:
    inputs = to_device(inputs, DEVICE)
    args = kernel.DrawArgs(
        inputs.temperature, inputs.seeds, inputs.positions,
        inputs.top_k, inputs.top_p, inputs.min_p,
        narrows=inputs.any_top_k or inputs.any_top_p or inputs.any_min_p,
    )  # fmt: skip
    return kernel.draw(logits.to(DEVICE), args).cpu()


def _logits(num_rows: int, vocab_size: int, kind: str = "normal") -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    if kind == "ties":
        return (logits / 3).round()
    if kind == "flat":
        return logits * 0
    if kind == "banned":
        logits[:, 7:-7] = -INF
    return logits


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    """Several tiles without a large vocabulary: the interpreter is slow."""
    monkeypatch.setattr(kernel, "TILE", 256)
    monkeypatch.setattr(kernel, "CHUNK", 256)
    return 256


@triton.jit
def _noise(seed, position, out, size, BLOCK: tl.constexpr):
    ids = tl.arange(0, BLOCK)
    times = log_times(tl.load(seed), tl.load(position), ids)
    tl.store(out + ids, times, mask=ids < size)


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (-1, 7), (2**63 - 1, 1 << 40)])
def test_noise_is_that_of_the_cpu(seed: int, position: int) -> None:
    size = 1000
    out = torch.empty(size, device=DEVICE)
    _noise[(1,)](
        torch.tensor([seed], device=DEVICE),
        torch.tensor([position], device=DEVICE),
        out,
        size,
        1024,
    )
    key = row_keys(np.array([seed]), np.array([position]))[0]
    want = torch.from_numpy(TokenNoise(size).log_times(key))
    torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [5, 128, 2049, 4500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_filters(vocab_size: int, dtype: torch.dtype) -> None:
    rows = [Row(0.0), *(Row(0.5 + i / 10, seed=i, position=i * i) for i in range(12))]
    logits = _logits(len(rows), vocab_size).to(dtype)
    inputs = make_inputs(rows)
    assert torch.equal(_draw(logits, inputs), Sampler()(logits, inputs).tokens)


@pytest.mark.parametrize(
    ("kind", "width"),
    [("normal", 16384), ("ties", 16384), ("flat", 16384), ("banned", 16384), ("ties", 8)],
)
def test_filters(kind: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Width 8: most rows have more candidates than fit and search the logits themselves."""
    monkeypatch.setattr(kernel, "MAX_CANDIDATES", width)
    monkeypatch.setattr(kernel, "CHUNK", 128)
    rows = [replace(row, seed=i) for i, row in enumerate(FILTERS)]
    inputs = make_inputs(rows)
    logits = _logits(len(rows), 199, kind)
    assert torch.equal(_draw(logits, inputs), Sampler()(logits.clone(), inputs).tokens)


def test_filters_over_several_tiles(small_tiles: int) -> None:
    inputs = make_inputs([replace(row, seed=9) for row in FILTERS])
    logits = _logits(len(FILTERS), 2 * small_tiles + 77).bfloat16()
    assert torch.equal(_draw(logits, inputs), Sampler()(logits.clone(), inputs).tokens)


@pytest.mark.usefixtures("small_tiles")
def test_rows_do_not_see_each_other() -> None:
    rows = [Row(0.0), Row(seed=1), Row(0.7, seed=2), *FILTERS[:4]]
    logits = _logits(len(rows), 600)
    whole = _draw(logits, make_inputs(rows))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    mixed = _draw(logits[order], make_inputs([rows[i] for i in order.tolist()]))
    assert torch.equal(mixed, whole[order])
    for i, row in enumerate(rows):
        assert int(_draw(logits[i : i + 1], make_inputs([row]))) == int(whole[i]), row


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("row", [Row(0.0), Row(1.0), *FILTERS[:3]], ids=str)
def test_odd_logits(row: Row) -> None:
    logits = _logits(8, 300)
    logits[0] = -INF
    logits[0, 42] = -5.0
    logits[1] = NAN
    logits[2] = NAN
    logits[2, 9] = 1.0
    logits[3] = -INF
    logits[4] = -1e30
    logits[4, 17] = 3e38
    logits[5, 23] = INF
    logits[6] = torch.finfo(torch.float32).min
    logits[6, 71] = -1e38
    want = _draw(logits[7:], make_inputs([row]))
    assert _draw(logits, make_inputs([row] * 8)).tolist() == [42, 0, 9, 0, 17, 23, 71, int(want)]


def test_ties_go_to_the_lowest_id(small_tiles: int) -> None:
    logits = torch.zeros(3, 4 * small_tiles)
    logits[:, [555, 3 * small_tiles]] = 7.0
    rows = [Row(0.0), Row(top_k=1), Row(top_p=1e-9)]
    assert _draw(logits, make_inputs(rows)).tolist() == [555, 555, 555]


def test_parameters_may_be_columns_of_a_table() -> None:
    logits = _logits(4, 300)
    rows = [Row(0.5 + i, top_k=9 * i, top_p=0.9, min_p=0.01, seed=i, position=7) for i in range(4)]
    inputs = make_inputs(rows)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    columns = {n: torch.stack([getattr(inputs, n)] * 3, dim=1)[:, 1] for n in names}
    assert not columns["seeds"].is_contiguous()
    strided = replace(inputs, **columns)
    assert torch.equal(_draw(logits, strided), _draw(logits, inputs))
    assert torch.equal(Sampler()(logits, strided).tokens, Sampler()(logits, inputs).tokens)


def test_strided_rows_and_no_rows() -> None:
    logits = _logits(2, 600)
    inputs = make_inputs([Row(seed=1), Row(seed=2)])
    assert torch.equal(_draw(logits[:, :500], inputs), _draw(logits[:, :500].contiguous(), inputs))
    assert _draw(logits[:0], make_inputs([])).shape == (0,)


@pytest.mark.parametrize("wishes", [[Row(0.0)] * 3, [Row(0.7), Row(0.0), Row(1.2)], FILTERS])
def test_rows_of_lasting_tables(wishes: list[Row]) -> None:
    """Red when a wish is read from another row, or a token is stored anywhere but in its place."""
    rows = [replace(row, seed=7 * i, position=i * i) for i, row in enumerate(wishes)]
    logits = _logits(len(rows), 199)
    want = _draw(logits, make_inputs(rows))
    ids = torch.randperm(len(rows) + 4, generator=torch.Generator().manual_seed(2))[: len(rows)]
    inputs = make_inputs(rows)
    columns = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
        own = getattr(inputs, name)
        column = torch.full((len(rows) + 4,), 77, dtype=own.dtype)
        column[ids] = own
        columns[name] = column.to(DEVICE)
    table = torch.full((len(rows) + 4, 70), -1, dtype=torch.int32)
    expected = table.clone()
    expected[ids, inputs.positions] = want.int()
    table = table.to(DEVICE)
    args = kernel.DrawArgs(
        positions=inputs.positions.int().to(DEVICE),
        narrows=inputs.any_top_k or inputs.any_top_p or inputs.any_min_p,
        rows=ids.int().to(DEVICE),
        table=table,
        **columns,
    )
    tokens = kernel.draw(logits.to(DEVICE), args)
    assert torch.equal(tokens.cpu(), want) and tokens.dtype == torch.int64
    assert torch.equal(table.cpu(), expected)
