"""AWQ checkpoints in the `gemm` layout: codes of four bits packed along the outputs.

A projection is `qweight` [in, out / 8], `qzeros` [groups, out / 8] and `scales` [groups, out]. Of
the eight codes in a word, the least significant first, the outputs are 0, 2, 4, 6, 1, 3, 5, 7.
Zeros are stored as they are. A projection without `qweight` is plain, so what is in
`modules_to_not_convert` needs no asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported, shown
from quire.load.checkpoint import Checkpoint
from quire.load.grouped import Grouped, consecutive
from quire.load.module import FLOATS, Module, Modules
from quire.load.quant_fields import bits_of, group_size_of
from quire.load.unpack import Piece
from quire.load.words import dense_codes
from quire.models.spec import Config
from quire.quant.methods import said_of
from quire.quant.weight import Weight

BITS = 4
PER_WORD = 32 // BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the code of each output lies
SYMMETRIC = 2 ** (BITS - 1)
BESIDE = ("qzeros", "scales")  # read along with a qweight


class AwqReader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        said = said_of(stored.config)
        self._modules = Modules.of(stored, device)
        # Early configs of AutoAWQ have other words for the same.
        short = {"bits": said.get("w_bit"), "group_size": said.get("q_group_size")}
        config = Config({**short, **{k: v for k, v in said.items() if v is not None}})
        bits_of(config, (BITS,))
        version = said.get("version") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise NotSupported(
                f"config.json: got version={shown(version)} of an awq checkpoint, of which only"
                " gemm is read"
            )
        self._group_size = group_size_of(config)

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        module, _, last = name.rpartition(".")
        if last in BESIDE and f"{module}.qweight" in self._modules.names:
            return {}
        if last != "qweight":
            return None
        return {f"{module}.weight": awq_piece(self._modules[module], self._group_size)}


def awq_piece(module: Module, group_size: int | None) -> Piece:
    """Checked by its headers. Raises CheckpointError."""
    num_in, num_words = module.matrix("qweight", torch.int32)
    num_out, size = num_words * PER_WORD, group_size or num_in
    if num_in % size:
        raise CheckpointError(
            f"config.json: got group_size={size} for {module.name}, which has {num_in} inputs: want"
            " a size that divides them, as AWQ's writers demand"
        )
    num_groups = num_in // size
    module.check("scales", (num_groups, num_out), *FLOATS)
    if module.has("qzeros"):
        module.check("qzeros", (num_groups, num_words), torch.int32)
    pack = partial(_weight, module, size)
    return Piece((num_out, num_in), lambda: pack().dequantize(), pack)


def _weight(module: Module, size: int) -> Weight:
    codes = _codes(module.read("qweight")).t()  # [out, in]
    zeros = _codes(module.read("qzeros")).t() if module.has("qzeros") else SYMMETRIC
    groups = consecutive(codes.shape[1], size, codes.device)
    return Grouped(codes, BITS, module.scales("scales").t(), zeros, groups).weight()


def _codes(words: Tensor) -> Tensor:
    """int32 [rows, out / 8] -> uint8 [rows, out]."""
    codes = dense_codes(words, BITS, words.shape[1] * PER_WORD)
    return codes.view(*words.shape, PER_WORD)[..., PLACES].flatten(1)
