"""Adapters as a GPU's layers add them, in the interpreter: products of whole models, merged or not.

Oracle: the same layer of the model whose weights have the adapter merged in. Red when a part's
columns, a scale, a gate, a bias or a slot is taken for another, or rows without an adapter get
other bits than the layer alone gives them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import NotSupported
from quire.kernels.matmul import Layouts
from quire.kernels.silu_mul import silu_mul
from quire.load.loader import load_weights
from quire.load.wish import Wish
from quire.lora.folder import read_adapter
from quire.lora.on_gpu import GpuAdapters
from quire.lora.placed import fitted, linears_of
from quire.lora.row_tiles import RowTiles
from quire.lora.step_on_gpu import GpuStep
from quire.models.decoder import Decoder, heads_of
from quire.models.registry import names_of, spec_of
from quire.nn.linear import Linear
from quire.nn.ops import SumKernel
from quire.ops.cuda_ops import CudaOps
from quire.ops.packed_forms import PackedForms
from quire.ops.packed_linear import EXPAND_ROWS
from quire.quant.load_forms import load_form
from quire.quant.weight import Dense, Weight
from tests.hf import StateDictCheckpoint, tiny_model
from tests.lora.cases import ALL, merged, write_adapter

CPU = torch.device("cpu")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
MODELS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "all": ("llama-packable", ALL, {}),
    "some, with biases": ("qwen2", ("q_proj", "v_proj", "up_proj"), {}),
    "fused by the family": ("phi3", FUSED, {}),
    "transposed": ("gpt2-16", ("c_attn", "c_proj", "c_fc"), {"fan_in_fan_out": True}),
}


@cache
def base(family: str) -> Any:
    return tiny_model(family)


def decoder(model: Any) -> Decoder:
    """In fp32, with a GPU's kernels, which the interpreter runs."""
    checkpoint = StateDictCheckpoint(model)
    spec = spec_of(checkpoint.config)
    with torch.inference_mode():
        made = Decoder(spec, heads_of(spec, 16), 64, torch.float32, CPU)
        load_weights(made, checkpoint, names_of(checkpoint.config, spec), Wish())
        made.finish(CudaOps(CPU, torch.float32))
    return made


def put(adapters: GpuAdapters, slot: int, folder: Path, model: Decoder, of: Any) -> int:
    names = names_of(StateDictCheckpoint(of).config, model.spec)
    return adapters.put(slot, fitted(read_adapter(folder), model, names))


def step(adapters: GpuAdapters, slots: list[int]) -> GpuStep:
    tail = RowTiles.of(np.asarray(slots[-1:]))
    return GpuStep.of(adapters, RowTiles.of(np.asarray(slots)), lambda: tail)


@pytest.mark.parametrize("case", MODELS)
def test_merged(case: str, tmp_path: Path) -> None:
    family, targets, config = MODELS[case]
    own, slots = base(family), [0, 2, 1, 2]
    folders = [
        write_adapter(tmp_path / str(rank), own, targets, rank=rank, seed=rank, **config)
        for rank in (4, 19)
    ]
    model = decoder(own)
    wanted = [linears_of(decoder(merged(own, folder))) for folder in folders]
    adapters = GpuAdapters(model, 2)
    for slot, folder in enumerate(folders, 1):
        put(adapters, slot, folder, model, own)
    for name, linear in list(linears_of(model).items())[:4]:
        x = torch.randn(4, linear.weight.shape[1], generator=torch.Generator().manual_seed(1))
        got = step(adapters, slots).multiply(linear, x)
        assert torch.equal(got[0], linear(x)[0])
        for row, slot in enumerate(slots):
            if slot:
                want = wanted[slot - 1][name](x[row : row + 1])[0]
                torch.testing.assert_close(got[row], want, rtol=2e-4, atol=2e-4)
        tail = step(adapters, slots).of_tail().multiply(linear, x[-1:])
        assert torch.equal(tail[0], got[-1])


def test_slots_are_used_again(tmp_path: Path) -> None:
    """Red when a slot keeps something of the adapter before, or `version` misses what graphs do
    not know."""
    own = base("llama-packable")
    model = decoder(own)
    adapters, versions = GpuAdapters(model, 2), []
    linear = linears_of(model)["layers.0.qkv"]
    x = torch.randn(3, linear.weight.shape[1])

    def added(slot: int) -> Tensor:
        return step(adapters, [slot] * 3).multiply(linear, x)

    plain = added(0)
    assert torch.equal(plain, linear(x))
    for number, (rank, targets) in enumerate([(4, ALL), (16, ALL), (40, ("v_proj",))]):
        folder = write_adapter(tmp_path / str(number), own, targets, rank, seed=number)
        num_bytes = put(adapters, 1, folder, model, own)
        versions.append(adapters.version)
        alone = GpuAdapters(model, 1)
        assert put(alone, 1, folder, model, own) == num_bytes
        assert torch.equal(added(1), step(alone, [1] * 3).multiply(linear, x))
        adapters.drop(1)
    assert versions[0] == versions[1] < versions[2]


def test_a_copy_comes_back_in_another_slot(tmp_path: Path) -> None:
    """Red when places of parts are those of the memory that was left, or the copy is a view of
    it."""
    own = base("llama-packable")
    model = decoder(own)
    adapters = GpuAdapters(model, 2)
    put(adapters, 1, write_adapter(tmp_path / "a", own, rank=19), model, own)
    linears = list(linears_of(model).values())[:4]
    inputs = [torch.randn(3, linear.weight.shape[1]) for linear in linears]

    def added(slot: int) -> list[Tensor]:
        pairs = zip(linears, inputs, strict=True)
        return [step(adapters, [slot, 0, slot]).multiply(linear, x) for linear, x in pairs]

    wanted, version = added(1), adapters.version
    copy = adapters.copy_of(1)
    adapters._held[1].memory.fill_(torch.nan)
    adapters.drop(1)
    for slot in (2, 1):
        adapters.restore(slot, copy)
        assert all(map(torch.equal, added(slot), wanted))
        assert adapters._held[slot].memory is not copy.memory
    assert adapters.version == version


def test_as_if_there_were_one(tmp_path: Path) -> None:
    """Red when what kernels are compiled for stays behind, or is of other shapes than the real."""
    own = base("llama-packable")
    model = decoder(own)
    adapters = GpuAdapters(model, 1)
    linears = list(linears_of(model).values())
    with adapters.as_if_of(16):
        expected = [adapters.places(linear) for linear in linears]
    assert adapters.version == 0 and not any(map(adapters.places, linears))
    put(adapters, 1, write_adapter(tmp_path / "a", own), model, own)
    for linear, place in zip(linears, expected, strict=True):
        found = adapters.places(linear)
        assert place is not None and found is not None
        assert place[2:] == found[2:]


def test_weights_too_large_for_the_dtype(tmp_path: Path) -> None:
    """Red when infinity gets into a tile, where neighbours multiply it by zero."""
    own = base("llama-packable")
    model = decoder(own)
    adapters = GpuAdapters(model, 1)
    adapters.dtype = torch.float16
    folder = write_adapter(tmp_path / "a", own)
    found = fitted(
        read_adapter(folder), model, names_of(StateDictCheckpoint(own).config, model.spec)
    )
    pair = next(iter(next(iter(found.values())).values()))
    pair.shrink[0, 0] = 1e5
    with pytest.raises(NotSupported, match="too large for"):
        adapters.put(1, found)


def test_many_rows_go_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a block of rows reads another block's inputs or tiles."""
    own = base("llama-packable")
    model = decoder(own)
    adapters = GpuAdapters(model, 1)
    put(adapters, 1, write_adapter(tmp_path / "a", own), model, own)
    linear = linears_of(model)["layers.0.down"]
    x = torch.randn(23, linear.weight.shape[1])
    slots = [row % 3 % 2 for row in range(23)]
    whole = step(adapters, slots).multiply(linear, x)
    monkeypatch.setattr("quire.lora.row_tiles.BLOCK_ROWS", 5)
    assert torch.equal(step(adapters, slots).multiply(linear, x), whole)


# ------------------------------------------------------------ sums of products

FORMS = ("float", "rtn-int4-g32", "rtn-int4-g32-asym", "int8", "fp8", "nf4")


def product(form: str, weights: list[Tensor], gate: str | None) -> SumKernel:
    ops = CudaOps(CPU, torch.float16)
    ops.packed = PackedForms(CPU, torch.float16, Layouts(use_library=False), lambda *_: None)
    made: list[Weight] = []
    for weight in weights:
        packed = Dense(weight.half()) if form == "float" else load_form(form).of(weight)
        assert packed is not None
        made.append(packed)
    kernel: Any = ops.linear(made, torch.randint(-3, 4, (64,)).half(), gate)
    return kernel


@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("form", FORMS)
def test_rounded_sums_are_the_product(form: str, gate: str | None) -> None:
    """Red when sums are of other columns, lack the bias, or were rounded already."""
    torch.manual_seed(4)
    weights = [torch.randn(32, 96) / 8 for _ in range(2)]
    kernel = product(form, weights, gate)
    for rows in (1, 5, EXPAND_ROWS):
        x = torch.randn(rows, 96).half()
        sums = kernel.sums(x)
        assert sums.dtype == torch.float32 and sums.shape == (rows, 64)
        rounded = sums.half()
        if gate is not None:
            rounded = silu_mul(rounded, gate, interleaved=kernel.pairs)
        assert torch.equal(rounded, kernel(x))
    assert not torch.equal(sums, sums.half().float())


def test_parts_in_different_forms() -> None:
    torch.manual_seed(5)
    packed = load_form("rtn-int4-g32").of(torch.randn(32, 96))
    assert packed is not None
    ops = CudaOps(CPU, torch.float16)
    ops.packed = PackedForms(CPU, torch.float16, Layouts(use_library=False), lambda *_: None)
    kernel: Any = ops.packed.linear([packed, Dense(torch.randn(32, 96).half())], None, "silu")
    x = torch.randn(3, 96).half()
    assert torch.equal(silu_mul(kernel.sums(x).half()), kernel(x)) and not kernel.pairs


def test_a_linear_that_no_adapter_touches_is_left_alone(tmp_path: Path) -> None:
    own = base("llama-packable")
    model = decoder(own)
    adapters = GpuAdapters(model, 1)
    put(adapters, 1, write_adapter(tmp_path / "a", own, ("q_proj",)), model, own)
    linear = linears_of(model)["layers.0.down"]
    calls: list[Tensor] = []

    def kernel(x: Tensor) -> Tensor:
        calls.append(x)
        return x

    untouched = Linear(16, {"out": 16}, bias=False, dtype=torch.float32, device=CPU)
    untouched.kernel = kernel
    x = torch.randn(2, 16)
    assert step(adapters, [1, 1]).multiply(untouched, x) is x and len(calls) == 1
    assert adapters.places(linear) is None
