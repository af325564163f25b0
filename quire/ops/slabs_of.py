"""Every form of weight as the slabs that GPU kernels read; the numbers stay the same.

What is brought along is as narrow as it can be without a change: scales in 16 bits where those hold
them, one scale where neighbours are equal, codes of three bits where a form keeps them in four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.chip import chip_of
from quire.kernels.matmul import interleave
from quire.kernels.slabs import (
    KINDS,
    PLANES,
    SlabForm,
    Slabs,
    pack_codes,
    pack_numbers,
    pack_pairs,
    pack_six_bits,
    sparse_in_lanes,
)
from quire.kernels.stream_packed_configs import FIELD, can_stream
from quire.kernels.stream_sparse_configs import can_stream_sparse
from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from quire.quant.load_forms import E2M1_TABLE
from quire.quant.scaled import Scaled
from quire.quant.sparse24 import KEPT, RUN, Sparse24
from quire.quant.weight import Weight

W = TypeVar("W", bound=Weight)
_WIDTHS = (64, 32, 16)  # more would take more registers than there are
_MOST_SLAB = 256  # inputs: more would be a longer step than pipelines like
_PAIRED = 128  # inputs: from here on a zero may take 16 bits, in one word with its scale


def slabs_of(
    weight: Weight, paired: bool = False, streamed: torch.dtype | None = None
) -> Slabs | None:
    """None: there are no kernels for the form. `paired`: rows gate | up as gate, up, gate, up.
    `streamed`: inputs' dtype, for the streaming kernels where one takes the form."""
    if isinstance(weight, Scaled):
        return _streamed_or_not(partial(_of_floats, weight, paired), streamed)
    if isinstance(weight, Sparse24):
        weight = _interleaved(weight) if paired else weight
        if streamed is not None and can_stream_sparse(
            weight.shape, streamed, chip_of(weight.values.device)
        ):
            return _of_lanes(weight, paired, streamed)
        return _of_sparse(weight, paired)
    if isinstance(weight, Codebook):
        weight = _interleaved(weight) if paired else weight
        return _streamed_or_not(partial(_of_codebook, weight, paired), streamed)
    if isinstance(weight, Coded) and _can_be_slabs(weight):
        weight = _interleaved(weight) if paired else weight
        return _streamed_or_not(partial(_of_codes, weight, paired), streamed)
    return None


def _streamed_or_not(make: Callable[[bool], Slabs], streamed: torch.dtype | None) -> Slabs:
    """`make` takes whether codes are to lie in lanes."""
    if streamed is not None:
        slabs = make(True)
        if can_stream(slabs.form, slabs.shape, streamed, chip_of(slabs.codes.device)):
            return slabs
    return make(False)


def joined(weights: Sequence[Weight]) -> list[Weight]:
    """The same rows in as few weights as can be."""
    runs = [[weights[0]]]
    for weight in weights[1:]:
        if runs[-1][0].is_like(weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [_one_below_the_other(run) for run in runs]


def _one_below_the_other(weights: list[Weight]) -> Weight:
    """Two by two: hundreds of experts are copied a few times each."""
    while len(weights) > 1:
        pairs = zip(weights[::2], weights[1::2], strict=False)
        weights = [one.join(other) for one, other in pairs] + weights[len(weights) // 2 * 2 :]
    return weights[0]


def moved(weight: Weight, device: torch.device) -> Weight:
    """The same on a device."""
    form: Any = weight  # forms are dataclasses, which their protocol does not say
    held = {field.name: getattr(form, field.name) for field in fields(form)}
    tensors = {name: t.to(device) for name, t in held.items() if isinstance(t, Tensor)}
    made: Weight = replace(form, **tensors)
    return made


def _interleaved(weight: W) -> W:
    return weight.pick(interleave(torch.arange(weight.shape[0])))


def _can_be_slabs(weight: Coded) -> bool:
    """Offsets are added to products that must be exact: see `unpack_scales.scaled`."""
    return weight.offsets is None or (
        weight.scales.dtype != torch.float32 and weight.offsets.dtype == weight.scales.dtype
    )


def _width(kind: str, bits: int, num_in: int, group: int) -> int:
    """Inputs of a field: in one group if there is such a width, filling slabs if there is one."""
    fields = 2 if kind == "2:4" else 8 // min(b for b in PLANES[bits] if b)

    def cost(width: int) -> tuple[bool, int, int]:
        return bool(group and group % width), -num_in % (fields * width), -width

    return min((w for w in _WIDTHS if w * fields <= _MOST_SLAB), key=cost)


def _of_floats(weight: Scaled, paired: bool, lanes: bool) -> Slabs:
    num_in = weight.shape[1]
    group = 0 if weight.block[1] >= num_in else weight.block[1]
    kind = "e4m3" if weight.tensor.dtype == torch.float8_e4m3fn else "e5m2"
    lanes = lanes and kind == "e4m3" and num_in % (2 * FIELD) == 0
    width = FIELD if lanes else _width(kind, 8, num_in, group)
    form = SlabForm(kind, 8, 0, width, group, weight.block[0], lanes=lanes)
    codes = weight.tensor.view(torch.uint8)
    scales = weight.scales
    if paired:
        codes = interleave(codes)
        scales = interleave(scales) if form.rows == 1 else scales
    words = pack_numbers(scales, _groups(form, num_in))
    packed = pack_codes(codes, form)
    packed = packed.view(weight.tensor.dtype) if kind == "e4m3" else packed
    return Slabs(form, weight.shape, packed, words, paired=paired)


def _of_codebook(weight: Codebook, paired: bool, lanes: bool) -> Slabs:
    num_in = weight.shape[1]
    lanes = lanes and num_in % (2 * FIELD) == 0
    width = FIELD if lanes else _width("table", 4, num_in, weight.block)
    form = SlabForm("table", 4, 0, width, weight.block, lanes=lanes)
    scales = _narrow(weight.scales)
    form = replace(form, scales=KINDS[scales.dtype])
    words = pack_numbers(scales, _groups(form, num_in))
    values = _table(weight.values, weight.codes.device)
    codes = pack_codes(weight.codes, form)
    return Slabs(form, weight.shape, codes, words, values=values, paired=paired)


def _of_codes(weight: Coded, paired: bool, lanes: bool) -> Slabs:
    weight = _coarser(weight)
    num_in, device = weight.shape[1], weight.codes.device
    kind, bits = _kind(weight), weight.bits
    if kind == "int" and bits == 4 and int(weight.codes.max()) < 8:
        bits = 3
    group = weight.block * weight.share
    group = 0 if group >= num_in and weight.super_scales is None else group
    lanes = lanes and kind != "tables" and bits > 2 and num_in % _slab_in_lanes(bits) == 0
    width = FIELD if lanes else _width(kind, bits, num_in, group)
    form = SlabForm(kind, *PLANES[bits], width, group, zero=weight.zero, lanes=lanes)
    form, made = _scales(weight, form)
    if lanes:
        made = _in_one(made)
    if form.kind == "table":
        assert weight.table is not None
        made["values"] = _table(weight.table, device)
    if weight.tables is not None:
        made["values"] = weight.tables
    codes = pack_codes(weight.codes, form)
    codes = codes.view(torch.int8) if bits == 8 else codes
    return Slabs(form, weight.shape, codes, order=weight.order, paired=paired, **made)


def _scales(weight: Coded, form: SlabForm) -> tuple[SlabForm, dict[str, Tensor]]:
    """The form with what is said of scales, and their words."""
    groups = _groups(form, weight.shape[1])
    offsets, zeros = weight.offsets, weight.zeros
    is_one = form.group == 0 and offsets is None and not weight.are_powers
    scales = weight.scales.float() if is_one else _narrow(weight.scales)
    kind = _power_kind(scales, form) if weight.are_powers else KINDS[scales.dtype]
    form = replace(form, scales=kind)
    made: dict[str, Tensor] = {}
    if weight.eighths:
        assert weight.super_scales is not None
        form = replace(form, scales=f"e4m3 {weight.eighths}")
        made["supers"] = pack_numbers(weight.super_scales, 1)
        return form, {**made, "scales": pack_numbers(scales, groups)}
    if weight.super_scales is not None:
        form = replace(form, super_size=weight.super_size)
        supers = -(-groups // weight.super_size)
        if weight.super_offsets is not None:
            made["supers"] = pack_pairs(weight.super_scales, weight.super_offsets, supers)
        else:
            made["supers"] = pack_numbers(weight.super_scales.float(), supers)
    if offsets is not None and offsets.dtype == torch.float16:
        return replace(form, offsets="f16"), {"scales": pack_pairs(scales, offsets, groups)}
    if offsets is not None and weight.can_pair:
        form = replace(form, scales="u4", offsets="u4")
        return form, {**made, "scales": pack_numbers(scales | offsets << 4, groups)}
    if form.bits == 3 and weight.super_scales is not None and _has_six_bits(scales):
        return replace(form, scales="s6"), {**made, "scales": pack_six_bits(scales, groups)}
    can_pair = scales.element_size() == 2 and form.group >= _PAIRED and form.bits > 3
    if can_pair and zeros is not None and zeros.dtype == torch.uint8:
        words = pack_pairs(scales, zeros.short(), groups)
        return replace(form, zeros="u16"), {"scales": words}
    made["scales"] = pack_numbers(scales, groups)
    if offsets is not None:
        form, made["offsets"] = replace(form, offsets="u8"), pack_numbers(offsets, groups)
    if zeros is not None:
        form = replace(form, zeros=KINDS[zeros.dtype])
        made["zeros"] = pack_numbers(zeros, groups)
    return form, made


def _slab_in_lanes(bits: int) -> int:
    return max(2, 8 // min(b for b in PLANES[bits] if b)) * FIELD


def _in_one(made: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same words, one kind below the other in one piece of memory: see `Slabs.words`."""
    names = [name for name in ("scales", "supers", "offsets", "zeros") if name in made]
    whole = torch.cat([made[name] for name in names])
    return dict(zip(names, whole.split([len(made[name]) for name in names]), strict=True))


def _has_six_bits(scales: Tensor) -> bool:
    """As those of Q3_K."""
    return scales.dtype == torch.int8 and int(scales.min()) >= -32 and int(scales.max()) < 32


def _power_kind(exponents: Tensor, form: SlabForm) -> str:
    """Powers up to 2**0 are factors of a quicker way to unpack (`kernels/unpack_e2m1.py`)."""
    is_low = form.kind == "e2m1" and not form.lanes and int(exponents.max()) <= 128
    return "power128" if is_low else "power"


def _of_sparse(weight: Sparse24, paired: bool) -> Slabs:
    num_out, num_in = weight.shape
    form = SlabForm("2:4", 4, 0, min(_width("2:4", 4, num_in, 0), 64))
    num_slabs = -(-num_in // form.slab)
    runs = form.width // RUN
    places = F.pad(weight.places, (0, num_slabs * form.fields * runs - weight.places.shape[1]))
    places = places.view(num_out, num_slabs, form.fields, runs).permute(1, 2, 0, 3)
    codes = (places[:, 0] | places[:, 1] << 4).contiguous()  # [slabs, out, runs]
    values = F.pad(weight.values, (0, num_slabs * form.slab // KEPT - weight.values.shape[1]))
    values = values.view(num_out, num_slabs, form.fields, runs, KEPT).permute(1, 2, 4, 0, 3)
    return Slabs(form, weight.shape, codes, values=values.contiguous(), paired=paired)


def _of_lanes(weight: Sparse24, paired: bool, dtype: torch.dtype) -> Slabs:
    values, codes = sparse_in_lanes(weight.values.to(dtype), weight.places)
    form = SlabForm("2:4", 4, 0, FIELD, lanes=True)
    return Slabs(form, weight.shape, codes, values=values, paired=paired)


def _table(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _kind(weight: Coded) -> str:
    if weight.tables is not None:
        return "tables"
    if weight.table is None:
        return "int"
    return "e2m1" if weight.table == E2M1_TABLE else "table"


def _groups(form: SlabForm, num_in: int) -> int:
    """Of a row, those of the inputs that fill up its last slab among them."""
    whole = num_in + -num_in % form.slab
    return -(-whole // form.group) if form.group else 1


def _narrow(numbers: Tensor) -> Tensor:
    """fp32 in 16 bits where nothing is lost."""
    if numbers.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(numbers.to(dtype).float(), numbers):
                return numbers.to(dtype)
    return numbers


def _coarser(weight: Coded) -> Coded:
    """With one scale where neighbours have the same, as ternary types have for eight blocks."""
    if weight.super_scales is not None or weight.offsets is not None or weight.zeros is not None:
        return weight
    while weight.scales.shape[1] % 2 == 0:
        even, odd = weight.scales[:, ::2], weight.scales[:, 1::2]
        if not torch.equal(even, odd):
            break
        weight = replace(weight, scales=even.contiguous(), share=2 * weight.share)
    return weight
