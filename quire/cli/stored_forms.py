"""The forms that stored weights will have in memory, and the bytes that a device keeps of each.

Headers say which tensors there are. What they become is asked of one weight for each set of shapes
and dtypes: it is read, and some of its rows are laid out as the device would have them. Where
the device has no kernel for a form, the weight counts as expanded. Whether a kernel holds on a GPU
is found when the engine starts, and not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import torch

from quire.cli.weight_forms import EMBEDDING, PLAIN, Held
from quire.load.checkpoint import Checkpoint, Stored
from quire.load.unpack import PlainCheckpoint, readable
from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from quire.quant.load_forms import E2M1_TABLE, NF4
from quire.quant.scaled import Scaled
from quire.quant.sparse24 import Sparse24
from quire.quant.weight import Dense, Weight

_MOST_ROWS = 1 << 14  # read of one weight: embeddings and heads have more
_SOME_ROWS = 256  # laid out: whole panels of a CPU, whole blocks of scales


class _Place(NamedTuple):
    device: torch.device
    dtype: torch.dtype  # of what is expanded

    def kept_bytes(self, weight: Weight, is_table: bool) -> float | None:
        """None: it is expanded, as tables of embeddings with sorted columns are."""
        num_out, num_in = weight.shape
        order = weight.order if isinstance(weight, Coded) else None
        if order is not None and is_table:
            return None
        some = weight.pick(slice(0, min(num_out, _SOME_ROWS)))
        some = replace(some, order=None) if isinstance(some, Coded) else some
        num_bytes = _panel_bytes(some) if self.device.type == "cpu" else _slab_bytes(some)
        if num_bytes is None:
            return None
        return num_bytes * num_out / some.shape[0] + (0 if order is None else 4 * num_in)


def _panel_bytes(weight: Weight) -> int | None:
    from quire.native.panels import can_be_panels, pack

    return pack(weight).num_bytes if can_be_panels(weight) else None


def _slab_bytes(weight: Weight) -> int | None:
    from quire.ops.slabs_of import slabs_of  # not above: CPU installs need no triton

    slabs = slabs_of(weight)
    return None if slabs is None else slabs.num_bytes


class StoredForms:
    """Of a checkpoint that is kept packed. `method`: how its weights are quantised; `dtype`: the
    model's."""

    def __init__(
        self, checkpoint: Checkpoint, method: str | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._stored, self._method = checkpoint, method
        self._plain = readable(checkpoint, torch.device("cpu"))
        self._place = _Place(device, dtype)
        self._found: dict[Hashable, Stored] = {}
        self._below: dict[str, list[str]] = defaultdict(list)  # names by what they begin with
        for name in checkpoint.names():
            parent = name.rpartition(".")[0]
            self._below[parent].append(name)
            self._below[parent.rpartition(".")[0]].append(name)

    def held(self) -> list[Held]:
        return [Held.of(name, *self._kept(name)) for name in self._plain.names()]

    def _kept(self, name: str) -> Stored:
        source = self._plain.source(name) if isinstance(self._plain, PlainCheckpoint) else name
        stored = self._stored.stored(source or name)
        if source is None or (source == name and self._method is None and stored.form in PLAIN):
            return stored
        is_table = Held.of(name, *stored).kind == EMBEDDING
        key = (self._shapes(source), self._plain.shape(name), is_table)
        if key not in self._found:
            self._found[key] = self._ask(name, source, is_table)
        return self._found[key]

    def _shapes(self, source: str) -> Hashable:
        """Of a stored tensor and those beside it, by their bytes."""
        parent = source.rpartition(".")[0]
        beside = self._below[parent]
        return tuple(sorted((n.removeprefix(parent), *self._stored.stored(n)) for n in beside))

    def _ask(self, name: str, source: str, is_table: bool) -> Stored:
        """Reads the weight."""
        shape, stored = self._plain.shape(name), self._stored.stored(source)
        size, num_out = torch.Size(shape).numel(), shape[0]
        weight = self._plain.packed(name, slice(_MOST_ROWS) if num_out > _MOST_ROWS else None)
        if weight is None and stored.form in PLAIN:
            each = stored.num_bytes // torch.Size(self._stored.shape(source)).numel()
            return Stored(stored.form, size * each)
        bits = 8 * stored.num_bytes / size
        words = stored.form if self._method is None else f"{self._method} {words_of(weight, bits)}"
        dtype = self._place.dtype
        if isinstance(weight, Dense) and weight.tensor.dtype.itemsize < dtype.itemsize:
            dtype = weight.tensor.dtype
        elif weight is not None and not isinstance(weight, Dense):
            num_bytes = self._place.kept_bytes(weight, is_table)
            if num_bytes is not None:
                return Stored(words, round(num_bytes * num_out / weight.shape[0]))
        kept = str(dtype).removeprefix("torch.")
        return Stored(f"{kept}, expanded from {words}", size * dtype.itemsize)


def words_of(weight: Weight | None, stored_bits: float) -> str:
    """A form in a few words. Narrow codes may be kept in more bits than they are stored in.

    >>> words_of(None, 4.0)
    '4 bits'
    """
    if isinstance(weight, Sparse24):
        return "2:4"
    if isinstance(weight, Scaled):
        kind = "E4M3" if weight.tensor.dtype is torch.float8_e4m3fn else "E5M2"
        height, width = weight.block
        is_row = width >= weight.shape[1]
        return kind if is_row else f"{kind} g{width}" if height == 1 else f"{kind} {height}x{width}"
    if isinstance(weight, Codebook):
        return f"{'nf4' if weight.values == NF4 else '16 values'} g{weight.block}"
    if isinstance(weight, Coded):
        group = weight.block * weight.share
        parts = [_codes(weight, stored_bits), f"g{group}" if group < weight.shape[1] else "rows"]
        parts += ["zeros"] * (weight.zeros is not None)
        return " ".join(parts + ["act order"] * (weight.order is not None))
    return f"{int(stored_bits)} bits"


def _codes(weight: Coded, stored_bits: float) -> str:
    if weight.tables is not None:
        return f"{2 ** int(stored_bits)} values"
    return "E2M1" if weight.table == E2M1_TABLE else f"{int(stored_bits)} bits"
