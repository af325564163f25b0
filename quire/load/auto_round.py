"""AutoRound checkpoints: the layouts of GPTQ or AWQ, with numbers of their own for some layers.

`packing_format` says which layout it is; `auto_round` alone is GPTQ's with zeros as they are, and
`auto_round:auto_gptq` has zeros less one. `extra_config` has other bits and groups by the names of
projections, or by regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from quire.errors import CheckpointError, NotSupported, shown
from quire.load import awq
from quire.load.checkpoint import Checkpoint
from quire.load.gptq import BESIDE, GptqForm, gptq_piece
from quire.load.module import Modules
from quire.load.quant_fields import bits_of, group_size_of, pattern
from quire.load.unpack import Piece
from quire.models.spec import Config
from quire.quant.methods import said_of

ZERO_SHIFTS = {"auto_round": 0, "auto_round:gptqmodel": 0, "auto_round:auto_gptq": 1}
AWQ = "auto_round:auto_awq"
BITS = (2, 3, 4, 5, 6, 7, 8)
_IS_PATTERN = re.compile(r"[*+?^$\\\[\](){}|]")


class AutoRoundReader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        said = said_of(stored.config)
        self._modules, self._said = Modules.of(stored, device), said
        self._layout = said.get("packing_format") or "auto_round:auto_gptq"
        if self._layout not in (*ZERO_SHIFTS, AWQ):
            raise NotSupported(
                f"config.json: got packing_format={shown(self._layout)} of auto-round, of which"
                f" only {', '.join((*ZERO_SHIFTS, AWQ))} are read"
            )
        if said.get("data_type", "int") != "int":
            raise NotSupported(
                f"config.json: got data_type={shown(said['data_type'])} of auto-round, want int"
            )
        self._names: dict[str, Mapping[str, Any]] = {}
        self._patterns: list[tuple[re.Pattern[str], Mapping[str, Any]]] = []
        for key, changes in Config(said).nested("extra_config").values.items():
            if not isinstance(changes, Mapping):
                raise CheckpointError(
                    f"config.json: got {shown(changes)} under {shown(key)} of extra_config, want"
                    " an object"
                )
            if _IS_PATTERN.search(key):
                self._patterns.append((pattern(key), changes))
            else:
                self._names[key] = changes

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        path, _, last = name.rpartition(".")
        if last in BESIDE and f"{path}.qweight" in self._modules.names:
            return {}
        if last != "qweight":
            return None
        module, config = self._modules[path], Config({**self._said, **self._changes(path)})
        if self._layout == AWQ:
            bits_of(config, (awq.BITS,))
            return {f"{path}.weight": awq.awq_piece(module, group_size_of(config))}
        form = GptqForm(
            bits_of(config, BITS), group_size_of(config), False, ZERO_SHIFTS[self._layout]
        )
        return {f"{path}.weight": gptq_piece(module, form)}

    def _changes(self, path: str) -> Mapping[str, Any]:
        if path in self._names:
            return self._names[path]
        return next((changes for found, changes in self._patterns if found.search(path)), {})
