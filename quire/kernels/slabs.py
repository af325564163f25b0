"""Slabs: how packed weights lie in a GPU's memory, whatever format they came in.

A slab is some neighbouring inputs of all rows: `fields` fields of `width` inputs. Its codes are
tiles [rows, width] of bytes, where a byte holds one input of several fields: one byte a thread
gives a weight of each field by shifts alone, and the rows of a program are one piece of memory.
Scales and zeros are words of four bytes (`unpack_scales.py`). Nothing is kept twice. The weights
that come out are `unpack.py`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from quire.kernels.launch import alignments

__all__ = [
    "KINDS",
    "PLANES",
    "SlabForm",
    "Slabs",
    "pack_codes",
    "pack_numbers",
    "pack_pairs",
    "pack_six_bits",
    "sparse_in_lanes",
]

# Bits of a code -> those of its low and its high plane.
PLANES = {1: (1, 0), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
KINDS = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int8: "s8",
}
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class SlabForm:
    """What a kernel is compiled for; `unpack.py` says what the names mean."""

    kind: str  # "int", "e4m3", "e5m2", "table", "tables", "e2m1" or "2:4"
    low: int  # bits of the low plane
    high: int
    width: int  # inputs of a field
    group: int = 0  # inputs that share a scale; 0: all of a row
    rows: int = 1  # rows that share a scale
    scales: str = "f32"
    offsets: str = ""
    super_size: int = 0
    zero: int = 0
    zeros: str = ""
    lanes: bool = False  # as `in_lanes` or `sparse_in_lanes` have them

    @property
    def fields(self) -> int:
        return 2 if self.kind == "2:4" else 8 // min(self.low, self.high or self.low)

    @property
    def name(self) -> str:
        """
        >>> SlabForm("int", 4, 0, 64, group=128).name
        'int4 g128'
        """
        kind = self.kind if self.kind in ("e4m3", "e5m2", "2:4") else f"{self.kind}{self.bits}"
        kind = "e2m1" if self.kind == "e2m1" else kind
        rows = f"x{self.rows}" if self.rows > 1 and self.group else ""
        return f"{kind} g{self.group}{rows}" if self.group else kind

    @property
    def bits(self) -> int:
        return self.low + self.high

    @property
    def slab(self) -> int:
        """Inputs."""
        return self.fields * self.width

    def constants(self) -> dict[str, object]:
        return {
            "KIND": self.kind,
            "LOW": self.low,
            "HIGH": self.high,
            "WIDTH": self.width,
            "FIELDS": self.fields,
            "GROUP": self.group,
            "ROWS": self.rows,
            "SCALES": self.scales,
            "OFFSETS": self.offsets,
            "SUPER": self.super_size,
            "ZERO": self.zero,
            "ZEROS": self.zeros,
            "LANES": self.lanes,
            "PLAIN": is_interpreted(),
        }


@dataclass(frozen=True, slots=True)
class Slabs:
    """A packed weight [out, in] as kernels read it."""

    form: SlabForm
    shape: tuple[int, int]
    codes: Tensor  # [slabs, tiles, out, width] bytes; 2:4's in lanes [slabs, out, 16]
    scales: Tensor | None = None  # [words of a row, ceil(out / form.rows)] int32, as what follows
    supers: Tensor | None = None
    offsets: Tensor | None = None
    zeros: Tensor | None = None
    values: Tensor | None = None  # a table's, or those that 2:4 keeps
    order: Tensor | None = None  # [in] the input of each column
    paired: bool = False  # rows were gate | up and are gate, up, gate, up ...

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """As kernels take them, after the inputs."""
        beside = (self.scales, self.supers, self.offsets, self.zeros)
        return (self.codes, *beside, self.values)

    @property
    def words(self) -> Tensor:
        """All numbers beside codes in lanes, one kind below the other [words, out]."""
        parts = [t for t in (self.scales, self.supers, self.offsets, self.zeros) if t is not None]
        (first, *others), columns = parts, self.shape[0]
        rows = len(first)
        for part in others:
            assert part.data_ptr() == first.data_ptr() + 4 * rows * columns, f"got {self.form}"
            rows += len(part)
        return first.as_strided((rows, columns), (columns, 1))

    @property
    def num_scale_rows(self) -> int:
        return 1 if self.scales is None else self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        found = [getattr(self, f.name) for f in fields(self)]
        return sum(t.numel() * t.element_size() for t in found if isinstance(t, Tensor))

    @property
    def kind(self) -> tuple[object, ...]:
        """What a compiled kernel was made for: see `launch.py`."""
        dtypes = tuple(None if t is None else t.dtype for t in self.tensors)
        return self.shape, self.num_scale_rows, dtypes, alignments(*self.tensors)

    @property
    def constants(self) -> Mapping[str, object]:
        return self.form.constants()


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which has no machine instructions."""
    return bool(triton.knobs.runtime.interpret)


def pack_codes(codes: Tensor, form: SlabForm) -> Tensor:
    """uint8 [out, in] -> [slabs, tiles, out, width] bytes. Columns are filled up with zeros."""
    num_out, num_in = codes.shape
    codes = F.pad(codes, (0, -num_in % form.slab))
    by_field = codes.view(num_out, -1, form.fields, form.width).permute(2, 1, 0, 3)
    if form.low == 8:
        whole = by_field.permute(1, 0, 2, 3)
        return in_lanes(whole) if form.lanes else whole.contiguous()
    planes = [(form.low, by_field & (1 << form.low) - 1)]
    if form.high:
        planes.append((form.high, by_field >> form.low))
    tiles = []
    for bits, plane in planes:
        per = 8 // bits
        for first in range(0, form.fields, per):
            byte = plane[first].clone()
            for i in range(1, per):
                byte |= plane[first + i] << bits * i
            tiles.append(byte)  # [slabs, out, width]
    packed = torch.stack(tiles, 1)
    return in_lanes(packed) if form.lanes else packed.contiguous()


def in_lanes(tiles: Tensor) -> Tensor:
    """Fields of 64 bytes in the order in which the threads of a matrix instruction read them.

    Input 16 j + 8 c + 2 t + p of a field goes to byte 16 t + 4 j + 2 p + c: thread t of four reads
    16 neighbouring bytes, and every other byte of a word is the next input (`stream_unpack.py`)."""
    parts = tiles.view(*tiles.shape[:-1], 4, 2, 4, 2)  # j, c, t, p
    lead = range(tiles.dim() - 1)
    j, c, t, p = range(tiles.dim() - 1, tiles.dim() + 3)
    return parts.permute(*lead, t, j, p, c).reshape(tiles.shape)


def sparse_in_lanes(values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Kept values [out, in / 2] and their places [out, in / 4] as the threads of a matrix
    instruction read them: values [slabs, out, 64] and bits [slabs, out, 16], as bytes.

    Input 64 f + 16 j + 8 c + 4 s + 2 h + p of a slab is for thread 2 s + h of four. That thread's
    word has a bit 16 f + 8 p + 2 j + c, set where the input has a value. Both values of a run are
    the pair 16 s + 8 f + 2 j + c of the slab's row, turned round where both are for h = 1: so
    each h finds a single value in a place of its own (`sparse_unpack.py`)."""
    num_out, runs = places.shape
    first, second = places & 3, places >> 2
    shape = (num_out, runs // 32, 2, 4, 2, 2)  # slabs, f, j, c, s
    is_turned = ((first >= 2) & (second >= 2))[..., None]
    pairs = values.view(num_out, runs, 2)
    pairs = torch.where(is_turned, pairs.flip(-1), pairs).view(*shape, 2)
    laid = pairs.permute(1, 0, 5, 2, 3, 4, 6).reshape(runs // 32, num_out, 64)
    spots = torch.arange(4, dtype=torch.uint8, device=places.device)
    is_value = (spots == first[..., None]) | (spots == second[..., None])  # [out, runs, 4]
    flags = is_value.view(*shape, 2, 2).permute(1, 0, 5, 6, 2, 7, 3, 4)  # slabs, out, s, h, f, p
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=places.device)
    packed = (flags.flatten(-2) * weights).sum(-1, dtype=torch.uint8)
    return laid, packed.reshape(runs // 32, num_out, 16)


def pack_numbers(numbers: Tensor, num_groups: int) -> Tensor:
    """[rows, groups] -> words [stretches, rows]; missing groups are zeros."""
    per = 4 // numbers.element_size()
    filled = F.pad(numbers.view(_WHOLE[numbers.element_size()]), _missing(numbers, num_groups, per))
    return filled.contiguous().view(torch.int32).t().contiguous()


def pack_pairs(low: Tensor, high: Tensor, num_groups: int) -> Tensor:
    """Two of 16 bits [rows, groups] in one word each: [groups, rows]."""
    both = torch.stack((low.view(torch.int16), high.view(torch.int16)), -1)
    words = both.contiguous().view(torch.int32).squeeze(-1)
    return F.pad(words, _missing(words, num_groups, 1)).t().contiguous()


def pack_six_bits(numbers: Tensor, num_groups: int) -> Tensor:
    """Whole numbers from -32 on [rows, groups] -> three words for each 16 groups [words, rows]: low
    nibbles of the first eight and of the others, then two bits of all."""
    filled = F.pad(numbers.int() + 32, _missing(numbers, num_groups, 16)).unflatten(1, (-1, 16))
    low, high = filled & 15, filled >> 4
    nibbles = torch.arange(0, 32, 4, device=numbers.device)
    pairs = torch.arange(0, 32, 2, device=numbers.device)
    # Bits of different groups do not meet, so a sum joins them; of 64 bits, cut to 32.
    words = [(part.long() << nibbles).sum(-1) for part in (low[..., :8], low[..., 8:])]
    words.append((high.long() << pairs).sum(-1))
    return torch.stack(words, -1).flatten(1).to(torch.int32).t().contiguous()


def _missing(numbers: Tensor, num_groups: int, per: int) -> tuple[int, int]:
    return 0, num_groups + -num_groups % per - numbers.shape[1]
