"""Ternary checkpoints (BitNet b1.58): weights that are -1, 0 or 1 times one number per matrix.

Three forms are on disk: four weights to a byte beside a `weight_scale`, the same unpacked, and
plain weights to be rounded when they are read ("online"). All come out as codes of two bits, whose
products take their inputs in eight bits: how such models are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported, shown
from quire.load.checkpoint import Checkpoint
from quire.load.unpack import Piece
from quire.quant.coded import Coded
from quire.quant.methods import said_of
from quire.quant.weight import Dense, Weight

PER_BYTE = 4
BLOCK = 32  # inputs that codes are counted in
SCALE = "_scale"  # after the weight's own name
HEADS = ("lm_head", "embed_tokens", "model.embed_tokens")  # never ternary
WHOLE_NUMBERS = (torch.uint8, torch.int8)
SMALLEST = 1e-5


@dataclass(frozen=True, slots=True)
class TernaryForm:
    """What a config's `quantization_config` says of its weights."""

    rounds: bool  # weights are stored as trained; else they are ternary already
    divides: bool  # the stored scale is what ternary weights are divided by

    @staticmethod
    def of(config: Mapping[str, Any]) -> TernaryForm | None:
        """None where the checkpoint is of no such kind. Raises NotSupported."""
        said = said_of(config)
        if said.get("quant_method") != "bitnet":
            return None
        if said.get("use_rms_norm"):
            raise NotSupported(
                "config.json: got use_rms_norm=true in a bitnet quantization_config; norms inside"
                " the projections are not built, use a checkpoint with norms of its own"
            )
        kept = said.get("modules_to_not_convert") or []
        if not isinstance(kept, list) or any(name not in HEADS for name in kept):
            raise NotSupported(
                f"config.json: got modules_to_not_convert={shown(kept)}, want a list of"
                f" {', '.join(HEADS)} alone: a decoder is ternary in all its blocks or in none"
            )
        kind = said.get("linear_class") or "bitlinear"
        mode = said.get("quantization_mode") or "offline"
        if kind not in ("bitlinear", "autobitlinear") or mode not in ("offline", "online"):
            raise NotSupported(
                f"config.json: got linear_class={shown(kind)} and quantization_mode={shown(mode)},"
                " want bitlinear or autobitlinear, and offline or online"
            )
        rounds = mode == "online" and kind == "autobitlinear"
        return TernaryForm(rounds, divides=kind == "bitlinear")


class TernaryReader:
    """Ternary weights; see `unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        self._stored, self._names = stored, frozenset(stored.names())
        form = TernaryForm.of(stored.config)
        assert form is not None, "no ternary checkpoint"
        self._form = form

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        if name.endswith(".weight" + SCALE):
            return {}
        shape = self._stored.shape(name)
        if name + SCALE in self._names:
            if len(shape) != 2 or 0 in shape:
                raise CheckpointError(f"tensor {name} has shape {shape}, want two dimensions")
            if self._stored.read(name).dtype is torch.uint8:
                shape = (shape[0] * PER_BYTE, *shape[1:])
            ternary = partial(self._scaled, name)
        elif self._form.rounds and name.endswith("_proj.weight"):
            ternary = partial(self._rounded, name)
        elif self._stored.read(name).dtype in WHOLE_NUMBERS:
            raise CheckpointError(
                f"no tensor {name + SCALE}, without which {name}, which is whole numbers, cannot be"
                " read; the files are not those that config.json describes"
            )
        else:
            return None
        return {name: Piece(shape, lambda: ternary().dequantize(), ternary)}

    def _scaled(self, name: str) -> Weight:
        tensor, scale = self._stored.read(name), self._stored.read(name + SCALE).float()
        if scale.numel() != 1 or not bool(torch.isfinite(scale).all()) or bool((scale == 0).any()):
            raise CheckpointError(
                f"tensor {name + SCALE} is {scale.flatten()[:4].tolist()}, want one number, not 0"
            )
        weight = unpack(tensor) if tensor.dtype is torch.uint8 else tensor.float()
        return ternary_weight(weight, 1.0 / scale if self._form.divides else scale)

    def _rounded(self, name: str) -> Weight:
        weight = self._stored.read(name)
        return Dense(round_weight(weight), inputs="int8-row")


def ternary_weight(weight: Tensor, scale: Tensor) -> Weight:
    """[out, in] of -1, 0 and 1, times one number."""
    if weight.shape[1] % BLOCK:
        return Dense(weight * scale, inputs="int8-row")
    scales, share = scale.expand(weight.shape[0], 1).contiguous(), weight.shape[1] // BLOCK
    codes = (weight + 1.0).byte()
    return Coded(codes, 2, BLOCK, scales, zero=1, inputs="int8-row", share=share)


def unpack(packed: Tensor) -> Tensor:
    """[rows / 4, columns] bytes -> [rows, columns] of -1, 0 and 1, as fp32.

    Bits 0 and 1 of all bytes are the first quarter of the rows, bits 2 and 3 the second, and so on.
    """
    quarters = [(packed >> (2 * quarter)) & 3 for quarter in range(PER_BYTE)]
    values = torch.cat(quarters)
    if bool((values == 3).any()):
        raise CheckpointError("a packed ternary weight has 3 among its values, want 0, 1 or 2")
    return values.float() - 1.0


def round_weight(weight: Tensor) -> Tensor:
    """To -1, 0 or 1 times the mean size of its numbers."""
    wide = weight.float()
    scale = 1.0 / wide.abs().mean().clamp_min(SMALLEST)
    return ((wide * scale).round().clamp(-1.0, 1.0) / scale).to(weight.dtype)
