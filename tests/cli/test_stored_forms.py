"""What `inspect` says of stored weights, beside what a device keeps of them once loaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.cli.stored_forms import StoredForms
from quire.cli.weight_forms import Held as Row
from quire.load.checkpoint import Stored
from quire.native.library import find_library
from quire.ops.native_ops import NativeOps
from quire.quant.weight import Weight
from tests.load.held import CPU, Held, Vector, plain, vectors
from tests.load.test_quantized_fuzz import MADE

LIBRARY = find_library()[0]
FILES = ("gptq", "awq", "auto-round", "compressed-tensors", "bitsandbytes")
CASES = {(name, case): v for name in FILES for case, v in vectors(name).items()}
CASES |= {(name, case): v for name, found in MADE.items() for case, v in found.items()}
SAID = {
    ("gptq", "asym4"): "gptq 4 bits g32 zeros",
    ("gptq", "sym3"): "gptq 3 bits g32",
    ("gptq", "ordered4"): "gptq 4 bits g32 zeros act order",
    ("compressed-tensors", "nvfp4"): "compressed-tensors E2M1 g16",
    ("compressed-tensors", "fp8block"): "compressed-tensors E4M3 16x16",
    ("compressed-tensors", "mxfp8"): "compressed-tensors E4M3 g32",
    ("compressed-tensors", "int8"): "compressed-tensors 8 bits rows",
    ("compressed-tensors", "odd4"): "float32, expanded from compressed-tensors 4 bits",
    ("bitsandbytes", "nf4"): "bitsandbytes nf4 g64",
    ("fp8", "rows"): "fp8 E4M3",
    ("mxfp4", "experts"): "mxfp4 E2M1 g32",
    ("bitnet", "packed"): "bitnet 2 bits rows",
}


def rows_of(vector: Vector, prefix: str = "", device: torch.device = CPU) -> list[Row]:
    tensors = {prefix + name: tensor for name, tensor in vector.tensors.items()}
    stored = Held({"quantization_config": vector.said}, tensors)
    return StoredForms(stored, vector.said["quant_method"], device, torch.float32).held()


@pytest.mark.skipif(LIBRARY is None, reason="without the library weights are expanded")
@pytest.mark.parametrize("name, case", CASES)
def test_bytes_are_those_that_a_cpu_keeps(name: str, case: str) -> None:
    """Red when a weight that is expanded counts as packed, or the other way round, and when a
    container's words count in place of what they become."""
    assert LIBRARY is not None
    vector, ops = CASES[name, case], NativeOps(LIBRARY)
    stored = plain(vector.said, vector.tensors)
    for each in stored.names():
        weight = stored.packed(each)
        assert weight is not None
        ops.linear([weight], None)
    rows, kept = rows_of(vector), sum(ops.kept.values())
    is_expanded = any("expanded" in row.form for row in rows)
    assert is_expanded == ("float32" in ops.kept)
    if is_expanded:  # and padded to whole panels
        kept = 4 * vector.want.numel()
    assert sum(row.num_bytes for row in rows) == kept


@pytest.mark.parametrize("name, case", SAID)
def test_forms_have_bits_and_groups(name: str, case: str) -> None:
    """Red when a form is told by the dtype that its codes happen to be stored in."""
    assert {row.form for row in rows_of(CASES[name, case])} == {SAID[name, case]}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sorted_columns(device: str) -> None:
    """Red when experts whose columns are sorted count as expanded, or a table of embeddings as
    packed."""
    pytest.importorskip("triton")
    vector, place = CASES["gptq", "ordered4"], torch.device(device)
    packed = "gptq 4 bits g32 zeros act order"
    for layer in ("model.layers.0.mlp.", "model.layers.0.mlp.experts.0."):
        ((_, _, _, form, num_bytes),) = rows_of(vector, layer, place)
        assert form == packed and num_bytes < vector.want.numel()
    ((_, _, _, form, num_bytes),) = rows_of(vector, "model.embed_tokens.", place)
    assert form == f"float32, expanded from {packed}" and num_bytes == 4 * vector.want.numel()


class OneType(Held):
    """As a GGUF file whose type has no codes of single weights."""

    def stored(self, name: str) -> Stored:
        return Stored("IQ2_XS", 74)

    def packed(self, name: str, rows: slice | None = None) -> Weight | None:
        return None


def test_types_without_a_kernel_count_as_expanded() -> None:
    """Red when the roofline of an IQ file is that of its bytes."""
    stored = OneType({}, {"model.layers.0.mlp.up_proj.weight": torch.zeros(1, 256)})
    (row,) = StoredForms(stored, None, CPU, torch.bfloat16).held()
    assert (row.form, row.num_bytes) == ("bfloat16, expanded from IQ2_XS", 512)


def test_embeddings_are_read_in_part() -> None:
    """Red when bytes are those of the rows that were looked at, not of all."""
    codes = torch.zeros(20_000, 32, dtype=torch.int8)
    tensors: dict[str, Tensor] = {"lm_head.weight": codes, "lm_head.SCB": torch.ones(20_000)}
    said = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    held = Held({"quantization_config": said}, tensors)
    (row,) = StoredForms(held, "bitsandbytes", CPU, torch.float32).held()
    assert row.num_bytes == 20_000 * (32 + 4)
