"""Checkpoints of eight-bit floats: DeepSeek's own and those like them, and ModelOpt's.

`fp8` has a `weight_scale_inv` for each block of `weight_block_size` (which multiplies, whatever its
name says) or a `weight_scale` for a tensor or its rows. ModelOpt's have a `weight_scale` as well;
where it says NVFP4, `weight` is four-bit floats with a scale for every 16 inputs and a
`weight_scale_2` that multiplies. What is stored as plain floats is plain. Inputs are rounded as
`activation_scheme` says, in groups of 128 beside blocks of weights; fbgemm's row by row (its upper
bound of a row is not read), and ModelOpt's as `quant_algo` says.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.errors import NotSupported, shown
from quire.load.checkpoint import Checkpoint
from quire.load.floats4 import nvfp4_piece
from quire.load.floats8 import FP8, float8_piece, static_inputs
from quire.load.module import Module, Modules
from quire.load.unpack import Piece
from quire.models.spec import Config
from quire.quant.methods import said_of
from quire.quant.weight import Inputs

BESIDE = ("weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale", "activation_scale")
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")
MODELOPT_BLOCK = (128, 128)


class Fp8Reader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        self._modules, config = Modules.of(stored, device), Config(said_of(stored.config))
        self._block = _block_size(config)
        scheme = config.expect("activation_scheme", ("dynamic", "static"), "dynamic")
        self._is_static = scheme == "static"

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        path, _, last = name.rpartition(".")
        module = self._modules[path]
        if last in BESIDE:
            return {}
        if last != "weight" or module.dtype("weight") not in FP8:
            return None
        scale = "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"
        return {name: float8_piece(module, scale, self._block, self._inputs(module))}

    def _inputs(self, module: Module) -> Inputs:
        if self._block is not None:
            return "fp8-128" if self._block[1] == 128 else "float"
        return static_inputs(module) if self._is_static else "fp8-row"


class ModelOptReader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        said = said_of(stored.config)
        self._modules, algorithm = Modules.of(stored, device), said.get("quant_algo")
        self._algorithm = algorithm
        if algorithm not in ALGORITHMS:
            raise NotSupported(
                f"config.json: got quant_algo={shown(algorithm)} of modelopt, of which only"
                f" {', '.join(ALGORITHMS)} are read"
            )

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        path, _, last = name.rpartition(".")
        module = self._modules[path]
        if last == "pre_quant_scale":
            raise NotSupported(
                f"tensor {name} scales the inputs of a projection, which is not built; use a"
                " checkpoint that was quantised without it"
            )
        if last in BESIDE:
            return {}
        if last != "weight":
            return None
        if module.dtype("weight") in FP8:
            piece = float8_piece(module, "weight_scale", MODELOPT_BLOCK, self._inputs(module))
            return {name: piece}
        if module.dtype("weight") is torch.uint8:
            return {name: nvfp4_piece(module, "weight", "weight_scale_2", divides=False)}
        return None

    def _inputs(self, module: Module) -> Inputs:
        if self._algorithm == "FP8_PB_WO":  # weights only
            return "float"
        return static_inputs(module)


def _block_size(config: Config) -> tuple[int, int] | None:
    if not config.has("weight_block_size"):
        return None
    sizes = config.ids("weight_block_size")
    if len(sizes) != 2 or 0 in sizes:
        raise config.error("weight_block_size", "two whole numbers, 1 or more")
    return sizes[0], sizes[1]
