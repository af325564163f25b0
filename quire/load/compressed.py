"""compressed-tensors checkpoints: llm-compressor's and most of those that vLLM users publish.

What a projection holds is told by its tensors: `weight_packed` of words (whole numbers of 1 to 8
bits along the inputs) or of bytes (four-bit floats), or `weight` of signed bytes or eight-bit
floats, each with a `weight_scale`; or two of every four weights (`load/sparse24.py`). Stored whole
numbers are 2**(bits - 1) more than they stand for, zeros likewise, and those are packed along the
outputs. Words are padded or dense, depending on the version that wrote them; their number tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported
from quire.load import sparse24
from quire.load.checkpoint import Checkpoint
from quire.load.compressed_groups import Groups, Scheme
from quire.load.floats4 import mxfp4_piece, nvfp4_piece
from quire.load.floats8 import FP8, float8_piece, static_inputs
from quire.load.grouped import Grouped, checked_groups, consecutive
from quire.load.module import FLOATS, Module, Modules
from quire.load.sparse24 import sparse24_piece
from quire.load.unpack import Piece
from quire.load.words import DENSE, PADDED, Packing
from quire.quant.methods import said_of
from quire.quant.weight import Weight

BESIDE = (
    *("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
)


class CompressedReader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        self._modules, self._groups = Modules.of(stored, device), Groups.of(said_of(stored.config))

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        path, _, last = name.rpartition(".")
        module = self._modules[path]
        if last == "weight_packed":
            return {f"{path}.weight": self._packed(module)}
        if last in (sparse24.VALUES, sparse24.MASK, sparse24.SHAPE) and module.has(sparse24.MASK):
            return {f"{path}.weight": sparse24_piece(module)} if last == sparse24.VALUES else {}
        if last == "weight" and module.dtype("weight") in (torch.int8, *FP8):
            scheme = self._groups.scheme_of(path)
            return {name: _eight_bits(module, scheme)}
        return {} if last in BESIDE else None

    def _packed(self, module: Module) -> Piece:
        scheme = self._groups.scheme_of(module.name)
        if module.dtype("weight_packed") is torch.int32 and scheme.kind == "int":
            return _words(module, scheme)
        if scheme.bits != 4 or scheme.kind != "float":
            raise NotSupported(
                f"config.json: got {scheme.bits} bits of type {scheme.kind} for {module.name},"
                " whose weights are packed in bytes; only floats of 4 bits are read so"
            )
        if module.has("weight_global_scale"):
            return nvfp4_piece(module, "weight_packed", "weight_global_scale", divides=True)
        return mxfp4_piece(module, "weight_packed")


def _eight_bits(module: Module, scheme: Scheme) -> Piece:
    if module.dtype("weight") is torch.int8:
        shape = module.matrix("weight", torch.int8)
        _check_scales(module, scheme, shape)
        if scheme.has_zeros:
            module.check("weight_zero_point", module.shape("weight_scale"), torch.int8)
        return _piece(shape, partial(_bytes_weight, module, scheme))
    block = scheme.block
    if scheme.group_size is not None and scheme.strategy in ("group", "tensor_group"):
        block = (1, scheme.group_size)
    inputs = static_inputs(module) if scheme.inputs == "fp8-one" else scheme.inputs
    return float8_piece(module, "weight_scale", block, inputs)


def _words(module: Module, scheme: Scheme) -> Piece:
    module.check("weight_shape", (2,), torch.int64, torch.int32)
    num_out, num_in = shape = tuple(module.read("weight_shape").tolist())  # 16 bytes
    found = module.matrix("weight_packed", torch.int32)
    packing = _packing(module, scheme.bits, shape)
    if num_in < 1 or found != (num_out, packing.width(num_in, scheme.bits)):
        raise CheckpointError(
            f"tensor {module.path('weight_shape')} says {num_out} by {num_in}, and yet"
            f" {module.path('weight_packed')} has shape {found} for weights of {scheme.bits} bits"
        )
    num_groups = _check_scales(module, scheme, shape)
    if scheme.has_zeros and module.dtype("weight_zero_point") is torch.int8:  # of early versions
        module.check("weight_zero_point", (num_out, num_groups), torch.int8)
    elif scheme.has_zeros:
        num_words = packing.width(num_out, scheme.bits)
        module.check("weight_zero_point", (num_words, num_groups), torch.int32)
    if module.has("weight_g_idx"):
        module.check("weight_g_idx", (num_in,), torch.int32, torch.int64)
    return _piece(shape, partial(_words_weight, module, scheme, shape, packing))


def _packing(module: Module, bits: int, shape: tuple[int, int]) -> Packing:
    """Told by the number of words; where it is the same either way, by that of the zeros; where
    that is too, it is as the newest version has it."""
    num_out, num_in = shape
    sides = {"weight_packed": (num_in, slice(-1, None)), "weight_zero_point": (num_out, slice(1))}
    for last, (count, side) in sides.items():
        padded = PADDED.width(count, bits)
        if module.has(last) and padded != DENSE.width(count, bits):
            return PADDED if module.shape(last)[side] == (padded,) else DENSE
    return DENSE


def _piece(shape: tuple[int, int], pack: partial[Weight]) -> Piece:
    return Piece(shape, lambda: pack().dequantize(), pack)


def _check_scales(module: Module, scheme: Scheme, shape: tuple[int, int]) -> int:
    """The number of groups. Raises CheckpointError."""
    num_out, num_in = shape
    if scheme.strategy == "tensor":
        if torch.Size(module.shape("weight_scale")).numel() != 1:
            raise module.error("weight_scale", "one scale for all weights")
        return 1
    if scheme.strategy == "block":
        raise NotSupported(
            f"config.json: got strategy='block' for {module.name}, whose weights are whole numbers;"
            " these are read with scales by tensor, channel or group"
        )
    is_whole = scheme.strategy == "channel" or scheme.group_size is None
    num_groups = 1 if is_whole else -(-num_in // (scheme.group_size or num_in))
    module.check("weight_scale", (num_out, num_groups), *FLOATS)
    return num_groups


def _words_weight(
    module: Module, scheme: Scheme, shape: tuple[int, int], packing: Packing
) -> Weight:
    num_out, num_in = shape
    bits, scales = scheme.bits, _scales(module, num_out)
    zeros: Tensor | int = 1 << (bits - 1)
    if scheme.has_zeros:
        stored = module.read("weight_zero_point")
        is_packed = stored.dtype is torch.int32
        zeros = packing.codes(stored.t(), bits, num_out).t() if is_packed else stored.int() + zeros
        zeros = zeros.byte()
    codes = packing.codes(module.read("weight_packed"), bits, num_in)
    groups = _groups(module, scheme, num_in, scales.shape[1])
    return Grouped(codes, bits, scales, zeros, groups, scheme.inputs).weight()


def _bytes_weight(module: Module, scheme: Scheme) -> Weight:
    codes = module.read("weight").view(torch.uint8) ^ 128
    num_out, num_in = codes.shape
    scales = _scales(module, num_out)
    zeros: Tensor | int = 128
    if scheme.has_zeros:
        stored = module.read("weight_zero_point").view(torch.uint8) ^ 128
        zeros = stored.reshape(-1, scales.shape[1]).expand(num_out, -1)
    groups = _groups(module, scheme, num_in, scales.shape[1])
    return Grouped(codes, 8, scales, zeros, groups, scheme.inputs).weight()


def _scales(module: Module, num_out: int) -> Tensor:
    found = module.scales("weight_scale")
    return found.reshape(1, 1).expand(num_out, 1) if found.numel() == 1 else found


def _groups(module: Module, scheme: Scheme, num_in: int, num_groups: int) -> Tensor:
    size = (scheme.group_size or num_in) if num_groups > 1 else num_in
    in_turn = consecutive(num_in, size, module.source.device)
    if not module.has("weight_g_idx"):
        return in_turn
    found = module.read("weight_g_idx").long()
    if bool((found == -1).all()):  # never set
        return in_turn
    return checked_groups(found, num_groups, module.path("weight_g_idx"))
