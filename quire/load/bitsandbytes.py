"""bitsandbytes checkpoints: NF4 and FP4, and the eight bits of LLM.int8().

Four bits: `weight` is bytes of two codes, the first in the high bits, over the flattened weight.
`weight.quant_map` has the 16 values, `weight.absmax` a scale for every `blocksize` of them, and
`weight.quant_state.bitsandbytes__nf4` a JSON object as bytes with shape and block size. Scales may
be codes themselves (`nested_absmax`, `nested_quant_map` and an offset). Eight bits: `weight` is
signed bytes, and `SCB` has 127 times the scale of each row. Inputs are not split into large and
small ones, as LLM.int8() does: all are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported, shown
from quire.jsonfile import parse_object
from quire.load.checkpoint import Checkpoint
from quire.load.grouped import Grouped
from quire.load.module import FLOATS, Module, Modules
from quire.load.unpack import Piece
from quire.load.words import dense_codes
from quire.models.spec import Config
from quire.quant.codebook import Codebook
from quire.quant.methods import said_of
from quire.quant.weight import Weight

STATE = "quant_state.bitsandbytes__"  # nf4 or fp4 follows
STATE_BYTES = 4096  # the most that such an object has
BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
NUM_VALUES, NUM_NESTED = 16, 256


class BitsAndBytesReader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        self._modules, config = Modules.of(stored, device), Config(said_of(stored.config))
        if not config.flag("load_in_4bit") and not config.flag("load_in_8bit"):
            raise NotSupported(
                "config.json: got a bitsandbytes config with neither load_in_4bit nor load_in_8bit"
            )

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        path, _, last = name.rpartition(".")
        if last in ("SCB", "weight_format") or last in BESIDE or f".{STATE}" in name:
            return {}
        if last != "weight":
            return None
        if (dtype := self._modules[path].dtype("weight")) is torch.uint8:
            return {name: _four_bits(self._modules[name])}
        return {name: _eight_bits(self._modules[path])} if dtype is torch.int8 else None


# ------------------------------------------------------------ four bits


@dataclass(frozen=True, slots=True)
class State:
    """What `quant_state` says. It is read before the weight: it has the shape."""

    shape: tuple[int, int]
    block: int
    nested_block: int | None  # scales that share one; None: scales are numbers
    offset: float

    @staticmethod
    def of(weight: Module) -> State:
        """Raises CheckpointError."""
        last = next((STATE + kind for kind in ("nf4", "fp4") if weight.has(STATE + kind)), "")
        if not last:
            raise CheckpointError(
                f"no tensor {weight.path(STATE)}nf4 or fp4, without which {weight.name} cannot be"
                " read"
            )
        (length,) = shape if len(shape := weight.shape(last)) == 1 else (0,)
        if not 0 < length <= STATE_BYTES or weight.dtype(last) is not torch.uint8:
            raise weight.error(last, f"up to {STATE_BYTES} bytes")
        raw = bytes(weight.read(last).tolist())
        said = Config(parse_object(raw, f"tensor {weight.path(last)}"))
        sizes, block = said.ids("shape"), said.count("blocksize")
        if len(sizes) != 2 or 0 in sizes:
            raise CheckpointError(f"tensor {weight.path(last)} says shape {shown(sizes)}, want two")
        if not said.has("nested_blocksize"):
            return State((sizes[0], sizes[1]), block, None, 0.0)
        offset = said.values.get("nested_offset", 0.0)
        if not isinstance(offset, int | float) or not math.isfinite(offset):
            raise CheckpointError(
                f"tensor {weight.path(last)} says nested_offset {shown(offset)}, want a number"
            )
        return State((sizes[0], sizes[1]), block, said.count("nested_blocksize"), float(offset))


def _four_bits(weight: Module) -> Piece:
    """`weight` stands for the tensor itself: what is beside it has longer names."""
    state = State.of(weight)
    count = state.shape[0] * state.shape[1]
    stored = weight.source.stored.shape(weight.name)
    if torch.Size(stored).numel() != -(-count // 2):
        raise CheckpointError(
            f"tensor {weight.name} has shape {stored}, want {-(-count // 2)} bytes for weights of"
            f" shape {state.shape}"
        )
    num_blocks = -(-count // state.block)
    weight.check("quant_map", (NUM_VALUES,), torch.float32)
    if state.nested_block is None:
        weight.check("absmax", (num_blocks,), *FLOATS)
    else:
        weight.check("absmax", (num_blocks,), torch.uint8)
        weight.check("nested_quant_map", (NUM_NESTED,), torch.float32)
        weight.check("nested_absmax", (-(-num_blocks // state.nested_block),), *FLOATS)
    pack = partial(_codebook, weight, state)
    return Piece(state.shape, lambda: pack().dequantize(), pack)


def _codebook(weight: Module, state: State) -> Weight:
    num_out, num_in = state.shape
    stored = weight.source.stored.read(weight.name).to(weight.source.device).reshape(1, -1)
    pairs = dense_codes(stored, 4, 2 * stored.shape[1]).view(-1, 2)
    codes = pairs.flip(1).reshape(-1)[: num_out * num_in]  # the high bits come first
    # Blocks may end inside a row: scales are then of the parts that rows and blocks have in common.
    width = math.gcd(num_in, state.block)
    first = torch.arange(0, num_out * num_in, width, device=codes.device)
    scales = _absmax(weight, state)[first // state.block]
    values = tuple(weight.scales("quant_map").tolist())
    return Codebook(codes.view(state.shape), values, scales.view(num_out, -1))


def _absmax(weight: Module, state: State) -> Tensor:
    if state.nested_block is None:
        return weight.scales("absmax").float()
    codes = weight.read("absmax").int()
    above = torch.arange(len(codes), device=codes.device) // state.nested_block
    values = weight.scales("nested_quant_map").index_select(0, codes)
    return values * weight.scales("nested_absmax").float()[above] + state.offset


# ------------------------------------------------------------ eight bits


def _eight_bits(module: Module) -> Piece:
    shape = module.matrix("weight", torch.int8)
    module.check("SCB", (shape[0],), *FLOATS)
    pack = partial(_rows, module)
    return Piece(shape, lambda: pack().dequantize(), pack)


def _rows(module: Module) -> Weight:
    codes = module.read("weight").view(torch.uint8) ^ 128
    scales = module.scales("SCB").float().unsqueeze(1) / 127.0
    groups = torch.zeros(codes.shape[1], dtype=torch.int64, device=codes.device)
    return Grouped(codes, 8, scales, 128, groups).weight()
