"""GPTQ checkpoints: codes of 2, 3, 4 or 8 bits packed along the inputs, zeros along the outputs.

A projection is `qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales`
[groups, out] and `g_idx` [in], the group of each input. Files of the first version store zeros less
one, `gptq_v2` as they are. With act order, inputs of a group are scattered: codes are then sorted,
see `Coded.order`. Codes of three bits are kept in four. `dynamic` gives some projections other
numbers; a projection without `qweight` is plain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import CheckpointError, NotSupported, shown
from quire.load.checkpoint import Checkpoint
from quire.load.grouped import Grouped, checked_groups, consecutive
from quire.load.module import FLOATS, Module, Modules
from quire.load.quant_fields import bits_of, group_size_of, pattern
from quire.load.unpack import Piece
from quire.load.words import dense_codes
from quire.models.spec import Config
from quire.quant.methods import said_of
from quire.quant.weight import Weight

BITS = (2, 3, 4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is to be added to stored zeros
BESIDE = ("qzeros", "scales", "g_idx")  # read along with a qweight


@dataclass(frozen=True, slots=True)
class GptqForm:
    """How one projection is stored."""

    bits: int
    group_size: int | None  # None: all inputs are one group
    has_order: bool
    zero_shift: int

    @staticmethod
    def of(said: Mapping[str, Any]) -> GptqForm:
        config = Config(said)
        kind = said.get("checkpoint_format") or "gptq"
        if not isinstance(kind, str) or kind not in FORMATS:
            raise NotSupported(
                f"config.json: got checkpoint_format={shown(kind)}, of which only"
                f" {' and '.join(FORMATS)} are read"
            )
        has_order = config.flag("desc_act")
        return GptqForm(bits_of(config, BITS), group_size_of(config), has_order, FORMATS[kind])

    def with_(self, changes: Mapping[str, Any]) -> GptqForm:
        config = Config(changes)
        return replace(
            self,
            bits=bits_of(config, BITS) if config.has("bits") else self.bits,
            group_size=group_size_of(config) if config.has("group_size") else self.group_size,
            has_order=config.flag("desc_act", self.has_order),
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """GPTQModel's `dynamic`: patterns of module names and what is different about them."""

    rules: tuple[tuple[re.Pattern[str], Mapping[str, Any] | None], ...] = ()  # None: plain

    @staticmethod
    def of(said: object) -> Rules:
        if said is None:
            return Rules()
        if not isinstance(said, Mapping):
            raise CheckpointError(f"config.json: got dynamic={shown(said)}, want an object")
        rules = []
        for key, changes in said.items():
            if not isinstance(changes, Mapping):
                raise CheckpointError(
                    f"config.json: got {shown(changes)} under {shown(key)} of dynamic, want an"
                    " object"
                )
            found = pattern(key.removeprefix("-:").removeprefix("+:"))
            rules.append((found, None if key.startswith("-:") else changes))
        return Rules(tuple(rules))

    def form_of(self, module: str, form: GptqForm) -> GptqForm | None:
        """None: a rule says that it is plain."""
        for found, changes in self.rules:
            if found.match(module):
                return None if changes is None else form.with_(changes)
        return form


class GptqReader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        said = said_of(stored.config)
        self._modules = Modules.of(stored, device)
        self._form, self._rules = GptqForm.of(said), Rules.of(said.get("dynamic"))

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        module, _, last = name.rpartition(".")
        if last in BESIDE and f"{module}.qweight" in self._modules.names:
            return {}
        if last != "qweight":
            return None
        form = self._rules.form_of(module, self._form)
        if form is None:
            raise CheckpointError(
                f"config.json says under dynamic that {module} is not quantised, and yet there is a"
                f" tensor {name}"
            )
        return {f"{module}.weight": gptq_piece(self._modules[module], form)}


def gptq_piece(module: Module, form: GptqForm) -> Piece:
    """Checked by its headers. Raises CheckpointError."""
    num_words, num_out = module.matrix("qweight", torch.int32)
    if num_words * 32 % form.bits or num_out * form.bits % 32:
        raise module.error("qweight", f"whole numbers of codes of {form.bits} bits on both sides")
    num_in = num_words * 32 // form.bits
    num_groups = -(-num_in // (form.group_size or num_in))
    module.check("scales", (num_groups, num_out), *FLOATS)
    module.check("qzeros", (num_groups, num_out * form.bits // 32), torch.int32)
    if form.has_order or module.has("g_idx"):
        module.check("g_idx", (num_in,), torch.int32, torch.int64)
    pack = partial(_weight, module, form)
    return Piece((num_out, num_in), lambda: pack().dequantize(), pack)


def _weight(module: Module, form: GptqForm) -> Weight:
    words = module.read("qweight").t()  # [out, words]
    num_in = words.shape[1] * 32 // form.bits
    scales = module.scales("scales").t()  # [out, groups]
    zeros = dense_codes(module.read("qzeros"), form.bits, len(words))
    zeros = (zeros + form.zero_shift) & (2**form.bits - 1)  # a zero of 0 less one wraps around
    return Grouped(
        dense_codes(words, form.bits, num_in),
        form.bits,
        scales,
        zeros.t(),
        _groups(module, form.group_size or num_in, num_in, scales.shape[1]),
    ).weight()


def _groups(module: Module, size: int, num_in: int, num_groups: int) -> Tensor:
    if not module.has("g_idx"):
        return consecutive(num_in, size, module.source.device)
    return checked_groups(module.read("g_idx").long(), num_groups, module.path("g_idx"))
