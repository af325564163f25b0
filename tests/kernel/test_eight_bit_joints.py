"""Norms and gates that round what they make have the bits of separate launches.

In the interpreter; `tests/gpu/test_gpu_w8a8.py` says the same of a GPU, and
`test_eight_bit_compile.py` that sums of a row follow one order.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from quire.kernels import round_inputs as round_module
from quire.kernels import silu_mul_round as gate_module
from quire.kernels.eight_bit_matmul import EightBitTile, eight_bit_matmul
from quire.kernels.eight_bit_weight import EightBitWeight
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rms_norm_round import rms_norm_round
from quire.kernels.round_inputs import RoundedRows, Rounding, parts_of, round_inputs
from quire.kernels.silu_mul import silu_mul
from quire.kernels.silu_mul_round import silu_mul_round
from quire.kernels.vendor_eight_bit import VendorEightBit
from quire.load.loader import fill_random
from quire.load.wish import Wish
from quire.models.decoder import Block, Decoder, heads_of
from quire.models.registry import spec_of
from quire.models.tiny_configs import tiny_config
from quire.ops import eight_bit_joints as joints
from quire.ops.cuda_ops import CudaOps
from quire.ops.eight_bit_joints import EightBitJoints, EightBitPair
from quire.ops.eight_bit_linear import EightBitLinear
from quire.quant.load_forms import load_form

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
ROUNDINGS = {
    "int8": Rounding(torch.int8),
    "fp8": Rounding(E4M3),
    "int8-one": Rounding(torch.int8, scale=0.02),
    "fp8-one": Rounding(E4M3, scale=0.01),
}
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def _rows(m: int, k: int, seed: int = 0) -> Tensor:
    """Over several orders of magnitude; a row of zeros, and one with ties of whole steps."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=random) * torch.randn(m, k, generator=random).exp()
    x[m // 2] = 0.0
    x[-1] = (torch.arange(k) % 255 - 127) / 2
    return x


def _assert_same(got: RoundedRows, want: RoundedRows) -> None:
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("width", [64, 80, 333])
def test_a_norm_that_rounds(name: str, dtype: torch.dtype, width: int) -> None:
    """Red when floats are rounded that a norm has not made, or padding sets a scale."""
    wide, residual = _rows(9, width + 5).to(dtype), _rows(9, width, 1).to(dtype)
    x, rounding = wide[:, :width], ROUNDINGS[name]
    for weight in (torch.randn(width).to(dtype), 1 + 0.3 * torch.randn(width)):
        for other in (None, residual):
            normed, stream = rms_norm(x, weight, 1e-5, other)
            rows, summed = rms_norm_round(x, weight, 1e-5, rounding, other)
            _assert_same(rows, round_inputs(normed, rounding))
            assert torch.equal(summed, stream)


@pytest.mark.filterwarnings(
    "ignore:invalid value", "ignore:divide by zero"
)  # NumPy's, in the interpreter
def test_a_row_that_no_scale_makes_finite() -> None:
    """Red when what lies behind a row of zeros, divided by no eps, becomes its largest number."""
    x = torch.zeros(2, 80)
    x[1] = 3.0
    rows, _ = rms_norm_round(x, torch.ones(80), 0.0, Rounding(torch.int8))
    assert torch.equal(rows.codes[1], torch.full((80,), 127, dtype=torch.int8))
    assert rms_norm_round(x[:0], torch.ones(80), 0.0, Rounding(E4M3))[0].codes.shape == (0, 80)


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(
    "activation, m, width",
    [("silu", 1, 64), ("silu", 257, 48), ("silu", 5, 333), ("gelu", 5, 80), ("relu2", 5, 80)],
)
def test_a_gate_that_rounds(name: str, activation: str, m: int, width: int) -> None:
    """Red when the gate is rounded otherwise than on its own, or pairs are mixed up."""
    for dtype in FLOATS[:2]:
        pairs = (0.3 * _rows(m, 2 * width)).clamp(-9, 9).to(dtype)
        made = silu_mul(pairs, activation, interleaved=True)
        want = round_inputs(made, ROUNDINGS[name])
        _assert_same(silu_mul_round(pairs, ROUNDINGS[name], activation), want)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_long_rows_of_gates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a row that registers do not hold forgets its first or its last outputs."""
    pairs = torch.randn(3, 2 * 300).bfloat16()
    pairs[0, :2], pairs[1, -2:] = 9.0, 8.0
    want = round_inputs(silu_mul(pairs, interleaved=True), ROUNDINGS[name])
    monkeypatch.setattr(gate_module, "_MOST_BLOCK", 128)
    monkeypatch.setattr(gate_module, "_BLOCK", 128)
    gate_module._constants.cache_clear()
    _assert_same(silu_mul_round(pairs, ROUNDINGS[name]), want)
    gate_module._constants.cache_clear()


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("k", [64, 1000, 1024])
def test_programs_that_share_a_row(name: str, k: int) -> None:
    """Red when one writes another's codes, or finds a scale in its own ones alone."""
    x = _rows(5, k).bfloat16()
    want = round_inputs(x, ROUNDINGS[name], parts=1)
    for parts in (2, 4, 8):
        _assert_same(round_inputs(x, ROUNDINGS[name], parts), want)


def test_how_many_share_a_row() -> None:
    """Red when many rows or short ones are taken apart, or one long row is not."""
    assert parts_of(1, 14336) == 8 and parts_of(1, 4096) == 4 and parts_of(1, 1024) == 1
    assert parts_of(8, 14336) == 4 and parts_of(32, 14336) == 1
    assert parts_of(1, round_module._MOST_BLOCK + 1) == 1


def test_bounds_before_rounding_change_no_code() -> None:
    """Red when a number beyond the largest code, or a tie at it, gets another code than rounding
    first and bounding then gives it."""
    x = torch.cat((torch.arange(-600, 601) / 4, torch.tensor([3e38, -3e38, 126.5, 127.5])))[None]
    got = round_inputs(x, Rounding(torch.int8, scale=1.0)).codes
    assert torch.equal(got.float(), x.round().clamp(-127, 127))


# ------------------------------------------------------------ products


def _weight(n: int, k: int, dtype: torch.dtype, paired: bool = False) -> EightBitWeight:
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    codes = codes if dtype == torch.int8 else (codes.float() / 8).to(E4M3)
    return EightBitWeight(codes, torch.rand(1, n) * 0.01, 0, paired)


class Ours(VendorEightBit):
    """A library with our bits, for a machine without one."""

    def __call__(self, x: RoundedRows, weight: EightBitWeight, bias: Tensor | None) -> Tensor:
        return eight_bit_matmul(
            x, weight, bias, torch.bfloat16, EightBitTile(64, 64, 2, 4, 64), None
        )


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
@pytest.mark.parametrize("dtype", [torch.int8, E4M3], ids=str)
def test_a_gate_apart_from_its_product(dtype: torch.dtype) -> None:
    """Red when many rows get other bits than few, whose product has the gate, rounded or not."""
    torch.manual_seed(4)
    up, down = _weight(96, 128, dtype, True), _weight(64, 48, dtype)
    rounding, bias = Rounding(dtype), torch.randn(96).bfloat16()
    first, second = (
        EightBitLinear(up, rounding, bias, "silu"),
        EightBitLinear(down, rounding, None),
    )
    x = round_inputs(_rows(140, 128).bfloat16(), rounding)
    inner = first.multiply(x, torch.bfloat16)
    rounded = round_inputs(inner, rounding)
    want = second.multiply(rounded, torch.bfloat16)
    first.library = Ours()
    assert torch.equal(first.multiply(x, torch.bfloat16), inner)
    _assert_same(first.rounded(x, torch.bfloat16, rounding), rounded)
    assert torch.equal(EightBitPair(first, second).multiply(x, torch.bfloat16), want)
    few = RoundedRows(x.codes.view(torch.uint8)[:7].view(dtype), x.scales[:7])
    assert torch.equal(EightBitPair(first, second).multiply(few, torch.bfloat16), want[:7])


# ------------------------------------------------------------ loading


def _block(form: str, monkeypatch: pytest.MonkeyPatch, family: str = "llama") -> Block:
    monkeypatch.setattr("quire.ops.eight_bit_linear._CHECKED_ROWS", (1,))
    monkeypatch.setattr(joints, "_CHECKED_ROWS", (1, 4))
    spec = spec_of(tiny_config(family))
    with torch.inference_mode():
        model = Decoder(spec, heads_of(spec, 16), 64, torch.bfloat16, CPU)
        fill_random(model, 0, Wish(form=load_form(form, on_gpu=True)))
        model.finish(CudaOps(CPU, torch.bfloat16))
    return model.blocks[0]


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_blocks_join_their_norms(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a norm stays a launch of its own, or a joined one changes a bit."""
    block = _block(form, monkeypatch)
    assert block.store_normed is not None and block.mlp_normed is not None
    width = block.mlp.up.weight.shape[1]
    x, residual = _rows(5, width).bfloat16(), _rows(5, width, 1).bfloat16()
    calls: list[int] = []
    real = joints.rms_norm_round
    monkeypatch.setattr(joints, "rms_norm_round", lambda *a: calls.append(1) or real(*a))
    got = block.feed_forward(x, residual)
    assert calls == [1]
    block.mlp_normed = None
    want = block.feed_forward(x, residual)
    assert calls == [1] and all(map(torch.equal, got, want))


def test_who_keeps_its_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a router or a stream without a norm before it gets codes."""
    assert _block("fp8", monkeypatch, "qwen3_moe").mlp_normed is None
    block = _block("fp8", monkeypatch, "olmo2")
    assert block.store_normed is None and block.mlp_normed is None
    assert _block("rtn-int4-g32-asym", monkeypatch).store_normed is None


def test_what_differs_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a kernel with other bits, or one that does not compile, is used or fails a load."""
    monkeypatch.setattr(joints, "_CHECKED_ROWS", (1, 4))
    kernel, weight = EightBitLinear(_weight(64, 64, E4M3), Rounding(E4M3), None), torch.ones(64)
    assert EightBitJoints(torch.float32).normed(kernel, weight, 1e-5) is not None
    real = joints.rms_norm_round

    def off(*args: object) -> object:
        rows, stream = real(*args)
        rows.scales[-1] *= 1.5
        return rows, stream

    def refuse(*_: object) -> object:
        raise RuntimeError("no such instruction")

    for broken, why in ((off, "rounded norms differ"), (refuse, "no such instruction")):
        monkeypatch.setattr(joints, "rms_norm_round", broken)
        made = EightBitJoints(torch.float32)
        with pytest.warns(RuntimeWarning, match=why):
            assert made.normed(kernel, weight, 1e-5) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert made.normed(kernel, weight, 1e-5) is None, "said once"


def test_gates_that_differ_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joints, "_CHECKED_ROWS", (1, 4))
    up = EightBitLinear(_weight(96, 64, E4M3, True), Rounding(E4M3), None, "silu")
    down = EightBitLinear(_weight(64, 48, E4M3), Rounding(E4M3), None)
    made = EightBitJoints(torch.bfloat16)
    assert made.chained(up, down) is None, "only the library makes pairs"
    up.library = Ours()
    assert isinstance(made.chained(up, down), EightBitPair)
    blocks = EightBitLinear(_weight(64, 48, E4M3), Rounding(E4M3, 16), None)
    assert made.chained(up, blocks) is None and made.chained(down, down) is None
    monkeypatch.setattr(joints, "silu_mul_round", lambda x, *_: round_inputs(x, Rounding(E4M3)))
    with pytest.warns(RuntimeWarning, match="gates do not round"):
        assert EightBitJoints(torch.bfloat16).chained(up, down) is None
