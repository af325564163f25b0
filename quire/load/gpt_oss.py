"""gpt-oss's experts as stored, taken apart: one plain weight for each expert and projection.

A layer's experts lie in one tensor, gate and up interleaved: output 2j is gate j, output 2j + 1 is
up j. Published files hold it as MXFP4 with outputs as rows (`*_blocks` and `*_scales`), models
saved from training as plain numbers with outputs as columns. Biases are interleaved likewise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.checkpoint import Checkpoint
from quire.load.mxfp4 import BLOCK, BYTES, dequantize, mxfp4_codes
from quire.load.unpack import Piece
from quire.quant.weight import Weight

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?", re.ASCII)
# Which outputs of a stored tensor make which projection.
_PROJECTIONS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}
_NUM_DIMS = {None: 3, "_bias": 2, "_blocks": 4}
_OUTPUTS = {None: 2, "_bias": 1, "_blocks": 1}  # the dimension of a stored tensor's outputs


@dataclass(frozen=True, slots=True)
class ExpertReader:
    """`unpack.Reader`."""

    stored: Checkpoint
    device: torch.device

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        match = _EXPERTS.fullmatch(name)
        if match is None:
            return None
        prefix, projection, form = match.groups()
        if form == "_scales":
            return {}
        shape = self.stored.shape(name)
        if len(shape) != _NUM_DIMS[form]:
            raise CheckpointError(
                f"tensor {name} has shape {shape}, want {_NUM_DIMS[form]} dimensions, experts first"
            )
        if form == "_blocks":
            self._check_scales(name, shape)
        kind, pieces = "bias" if form == "_bias" else "weight", {}
        pick = {None: self._columns, "_bias": self._bias, "_blocks": self._packed_rows}[form]
        for expert in range(shape[0]):
            for part, which in _PROJECTIONS[projection].items():
                rows = len(range(shape[_OUTPUTS[form]])[which])
                at = (name, expert, which)
                pack = partial(self._packed, *at) if form == "_blocks" else None
                plain_name = f"{prefix}.{expert}.{part}.{kind}"
                pieces[plain_name] = Piece((rows, *_inputs(form, shape)), partial(pick, *at), pack)
        return pieces

    def _bias(self, name: str, expert: int, which: slice) -> Tensor:
        return self.stored.read(name)[expert, which]

    def _columns(self, name: str, expert: int, which: slice) -> Tensor:
        return self.stored.read(name)[expert].to(self.device).t()[which]

    def _packed_rows(self, name: str, expert: int, which: slice) -> Tensor:
        return dequantize(*self._blocks(name, expert, which), name)

    def _packed(self, name: str, expert: int, which: slice) -> Weight | None:
        return mxfp4_codes(*self._blocks(name, expert, which), name)

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        """By headers. Raises CheckpointError."""
        beside = _scales_of(name)
        found = self.stored.shape(beside)
        if found != shape[:-1] or shape[-1] != BYTES:
            raise CheckpointError(
                f"tensor {name} has shape {shape} and {beside} {found}, want {BYTES} bytes for"
                " each of the scales"
            )

    def _blocks(self, name: str, expert: int, which: slice) -> tuple[Tensor, Tensor]:
        scales = self.stored.read(_scales_of(name))
        blocks = self.stored.read(name)[expert, which].to(self.device)
        return blocks, scales[expert, which].to(self.device)


def _scales_of(name: str) -> str:
    return name.removesuffix("_blocks") + "_scales"


def _inputs(form: str | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    if form == "_bias":
        return ()
    return (shape[2] * BLOCK,) if form == "_blocks" else (shape[1],)
