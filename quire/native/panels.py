"""Weights as the native kernels read them: panels of 16 outputs, side by side in every vector.

Of whole numbers, a vector holds inputs 4j to 4j + 3 of 16 outputs: 64 codes. Narrow codes lie in
planes of 4, 2 and 1 bits, several vectors of codes to one of bytes. Of floats, a vector holds one
input of 16 outputs. Outputs are padded with zeros to whole panels. Where columns of codes are
sorted by group (act order), rows are brought into that order before they are multiplied.
`src/quire_native.h` is the other side of this page.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.native import float_panels, sparse_panels
from quire.native.library import Matrix
from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from quire.quant.scaled import Scaled
from quire.quant.sparse24 import Sparse24
from quire.quant.weight import Dense, Weight

PANEL = 16
PLANES = {2: ((2, 0),), 4: ((4, 0),), 5: ((4, 0), (1, 4)), 6: ((4, 0), (2, 4))}  # width, shift
FLOAT_CODES = {torch.float32: 100, torch.float16: 101, torch.bfloat16: 102}
FLOAT_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in FLOAT_CODES.items()}
TABLE_CODES = 40
HALF_SCALES, FLOAT_SCALES, U8_SCALES, S8_SCALES, POWER_SCALES = range(5)
TIMES_SCALES, OVER_SCALES, PAIR_SCALES, BRAIN_SCALES = 6, 7, 8, 9

SCALE_KINDS = {torch.float16: HALF_SCALES, torch.float32: FLOAT_SCALES}
SCALE_KINDS |= {torch.uint8: U8_SCALES, torch.int8: S8_SCALES, torch.bfloat16: BRAIN_SCALES}

# Bits, block, and what a group has besides its scale.
KINDS = {(2, 32, ""), (4, 16, ""), (4, 32, ""), (5, 32, ""), (6, 16, ""), (8, 32, "")}
KINDS |= {(2, 16, "offsets"), (4, 32, "offsets"), (5, 32, "offsets")}
KINDS |= {(2, 16, "zeros"), (2, 32, "zeros"), (4, 16, "zeros"), (4, 32, "zeros")}
KINDS |= {(5, 32, "zeros"), (6, 16, "zeros"), (8, 32, "zeros")}
KINDS |= {(TABLE_CODES, 16, ""), (TABLE_CODES, 32, "")}


ADDRESSES = tuple(field[0] for field in Matrix._fields_ if field[1] is c_void_p)
NUMBERS = tuple(field[0] for field in Matrix._fields_ if field[1] is not c_void_p)


@dataclass(slots=True)
class Panels:
    """A weight and the tensors its addresses point into."""

    weight: Matrix
    tensors: tuple[Tensor | None, ...]  # in the order of ADDRESSES

    @staticmethod
    def of(tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> Panels:
        """`numbers` are in the order of NUMBERS."""
        return Panels(Matrix(*map(_address, tensors), *numbers), tuple(tensors))

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(getattr(self.weight, name)) for name in NUMBERS)

    def move(self, tensors: Sequence[Tensor | None]) -> None:
        """Read the same numbers from elsewhere. Not while a product runs."""
        for name, tensor in zip(ADDRESSES, tensors, strict=True):
            setattr(self.weight, name, _address(tensor))
        self.tensors = tuple(tensors)

    @property
    def order(self) -> Tensor | None:
        """[in] int32: which input each column is for; None: its own."""
        return self.tensors[ADDRESSES.index("order")]

    @property
    def num_out(self) -> int:
        return int(self.weight.num_out)

    @property
    def num_in(self) -> int:
        return int(self.weight.num_in)

    @property
    def form(self) -> str:
        """In a few words."""
        bits = int(self.weight.bits)
        if bits in FLOAT_NAMES:
            return FLOAT_NAMES[bits]
        for names in (float_panels.NAMES, sparse_panels.NAMES):
            if bits in names:
                return names[bits]
        return "4 bits by a table" if bits == TABLE_CODES else f"{bits} bits"

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors if t is not None)


def can_be_panels(weight: Weight) -> bool:
    """Whether the library has kernels for the form; see products.c."""
    if isinstance(weight, Dense):
        return weight.tensor.dtype in FLOAT_CODES
    if float_panels.can_be_float_panels(weight) or sparse_panels.can_be_sparse_panels(weight):
        return True
    if not isinstance(weight, Coded) or weight.shape[1] % 32:
        return False
    if weight.tables is not None and not _share_tables(weight.tables):
        return False
    bits = TABLE_CODES if _has_table(weight) else weight.bits
    added = "zeros" if weight.zeros is not None else "offsets" if weight.offsets is not None else ""
    return (bits, weight.block, added) in KINDS


def pack(weight: Weight, bias: Tensor | None = None) -> Panels:
    if isinstance(weight, Coded):
        return pack_codes(weight, bias)
    if isinstance(weight, Scaled):
        return Panels.of(*float_panels.pack_scaled(weight, _wide_bias(bias)))
    if isinstance(weight, Codebook):
        return Panels.of(*float_panels.pack_codebook(weight, _wide_bias(bias)))
    if isinstance(weight, Sparse24):
        return Panels.of(*sparse_panels.pack_sparse(weight, _wide_bias(bias)))
    assert isinstance(weight, Dense), f"no panels for {type(weight).__name__}"
    return pack_floats(weight.tensor, bias)


def pack_floats(weight: Tensor, bias: Tensor | None = None) -> Panels:
    """[out, in] fp32, fp16 or bf16, kept as it is."""
    num_out, num_in = weight.shape
    panels = _padded(weight).view(-1, PANEL, num_in).transpose(1, 2).contiguous()
    tensors = (panels, None, None, None, None, None, _wide_bias(bias), None, None)
    return Panels.of(
        tensors, (num_out, num_in, FLOAT_CODES[weight.dtype], 1, 0, FLOAT_SCALES, 1, 1, 0)
    )


def pack_codes(coded: Coded, bias: Tensor | None = None) -> Panels:
    assert coded.offsets is None or coded.zero == 0, "an offset takes the place of a zero"
    table = _tables(coded) if _has_table(coded) else None
    kind, scales, offsets = _scales(coded)
    tensors = (
        _planes(coded),
        _by_panel(scales),
        _by_panel(offsets),
        _by_panel(coded.zeros),
        _by_panel(_super_scales(coded)),
        _by_panel(coded.super_offsets),
        _wide_bias(bias),
        table,
        None if coded.order is None else coded.order.int(),
    )
    bits = coded.bits if table is None else TABLE_CODES
    size = coded.scales.shape[1] if coded.eighths else coded.super_size
    shape = (*coded.shape, bits, coded.block, coded.zero, kind, size)
    rules = (coded.share, 1 if coded.inputs == "int8-row" else 2)
    return Panels.of(tensors, (*shape, *rules))


def _has_table(coded: Coded) -> bool:
    return coded.table is not None or coded.tables is not None


def _share_tables(tables: Tensor) -> bool:
    """Whether every four rows have one table: a lookup is for four."""
    whole = tables[: len(tables) // 4 * 4].view(-1, 4, tables.shape[1])
    rest = tables[len(whole) * 4 :]
    return bool((whole == whole[:, :1]).all()) and bool((rest == rest[:1]).all())


def _tables(coded: Coded) -> Tensor:
    """[panels, 4, 16] int8."""
    if coded.tables is not None:
        return _padded(coded.tables)[::4].contiguous().view(-1, 4, 16)
    table = torch.tensor(coded.table, dtype=torch.int8)
    return table.expand(-(-coded.shape[0] // PANEL), 4, 16).contiguous()


def _planes(coded: Coded) -> Tensor:
    # Four codes move as one word: [panels, 16, blocks, vectors] -> [panels, blocks, vectors, 16].
    words = _padded(coded.codes).contiguous().view(torch.int32)
    blocks = words.view(-1, PANEL, coded.shape[1] // coded.block, coded.block // 4)
    vectors = blocks.permute(0, 2, 3, 1).contiguous().view(torch.uint8)  # [..., 64]
    if coded.bits == 8:
        return vectors
    return torch.cat([_plane(vectors, *plane) for plane in PLANES[coded.bits]], 2)


def _plane(vectors: Tensor, width: int, shift: int) -> Tensor:
    """Some bits of every code: the first vectors of a block lowest, the last ones highest."""
    num_vectors = vectors.shape[2]
    num_bytes = max(1, num_vectors * width // 8)
    made = torch.zeros(*vectors.shape[:2], num_bytes, 64, dtype=torch.uint8)
    mask = (1 << width) - 1
    for j in range(0, num_vectors, num_bytes):
        part = vectors[:, :, j : j + num_bytes] >> shift & mask
        made |= part << width * (j // num_bytes)
    return made


def _by_panel(scales: Tensor | None) -> Tensor | None:
    """[out, groups] -> [panels, groups, 16]."""
    if scales is None:
        return None
    return _padded(scales).view(-1, PANEL, scales.shape[1]).transpose(1, 2).contiguous()


def _padded(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % PANEL
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _wide_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else F.pad(bias.float(), (0, -bias.shape[0] % PANEL)).contiguous()


def _super_scales(coded: Coded) -> Tensor | None:
    """To divide by a number, kernels want its negative and its reciprocal."""
    above = coded.super_scales
    if coded.eighths == "over":
        assert above is not None
        return torch.cat((-above, 1 / above), 1)
    return above


def _scales(coded: Coded) -> tuple[int, Tensor, Tensor | None]:
    """Their kind, and scales and offsets as they are kept."""
    if coded.offsets is not None and coded.can_pair:
        return PAIR_SCALES, coded.scales | coded.offsets << 4, None
    if coded.eighths:
        kind = OVER_SCALES if coded.eighths == "over" else TIMES_SCALES
        return kind, coded.scales, coded.offsets
    if coded.are_powers:
        return POWER_SCALES, coded.scales, coded.offsets
    scales = coded.scales if coded.offsets is not None else _narrow(coded.scales)
    return SCALE_KINDS[scales.dtype], scales, coded.offsets


def _narrow(scales: Tensor) -> Tensor:
    """fp32 in 16 bits where nothing is lost: files have them in bf16."""
    if scales.dtype is torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(scales.to(dtype).float(), scales):
                return scales.to(dtype)
    return scales


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
