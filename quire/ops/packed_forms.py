"""PackedForms: CUDA kernels of packed weights where they hold, expanded weights where they do not.

A form is checked on the device when its first weight comes (`packed_check.py`). What fails is
expanded to the model's dtype as if nothing had been packed, and said once, with the reason.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.kernels.eight_bit_weight import CHAIN
from quire.kernels.expand import Scratch, embed_packed
from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.matmul import Layouts
from quire.kernels.slabs import Slabs
from quire.kernels.vendor_eight_bit import VendorEightBit
from quire.nn.ops import SumKernel
from quire.ops.eight_bit_experts import ExpertBytes, expert_bytes, grouped_difference
from quire.ops.eight_bit_linear import EightBitLinear, difference
from quire.ops.eight_bit_of import EightBitForm, eight_bit_form, eight_bit_weight
from quire.ops.int8_inputs import Int8SumInputs
from quire.ops.matmul_linear import MatmulLinear
from quire.ops.packed_check import failure_of, why_not
from quire.ops.packed_experts import ExpertRows, ExpertSlabs
from quire.ops.packed_linear import PackedLinear, PartsLinear
from quire.ops.slabs_of import joined, moved, slabs_of
from quire.quant.coded import Coded
from quire.quant.deferred import made
from quire.quant.scaled import Scaled
from quire.quant.weight import Dense, Weight

Check = Callable[[Weight, str | None, torch.dtype, bool], str | None]
CheckEightBit = Callable[[Weight, EightBitForm, torch.dtype], str | None]


class PackedForms:
    def __init__(
        self, device: torch.device, dtype: torch.dtype, layouts: Layouts, check: Check = why_not
    ) -> None:
        self.device, self.dtype, self.layouts, self.check = device, dtype, layouts, check
        self.check_eight_bit: CheckEightBit = difference
        self.check_grouped: CheckEightBit = grouped_difference
        self.scratch = Scratch()
        self.library = VendorEightBit() if dtype == torch.bfloat16 else None
        self.kept: Counter[str] = Counter()  # bytes of weights by their form
        self.refused: dict[str, str] = {}  # forms that are expanded, and why
        self.unstreamed: set[str] = set()  # forms whose streamed kernel fails
        self.unrounded: dict[str, str] = {}  # forms whose inputs stay floats, and why
        self._verdicts: dict[object, str | None] = {}

    def linear(self, weights: Sequence[Weight], bias: Tensor | None, gate: str | None) -> SumKernel:
        """Parts one below the other; those that are alike are one product."""
        parts = joined([self.ready(weight) for weight in weights])
        if len(parts) == 1:
            return self._part(parts[0], bias, gate)
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else list(bias.split(sizes))
        made_of = zip(parts, biases, strict=True)
        return PartsLinear([self._part(part, b, None) for part, b in made_of], gate)

    def ready(self, weight: Weight) -> Weight:
        """On the device, and no narrower than the model if it is of floats."""
        weight = moved(made(weight), self.device)
        if not isinstance(weight, Dense) or weight.tensor.itemsize >= self.dtype.itemsize:
            return weight  # what is wider than the model is so for a reason: routers are
        return Dense(weight.tensor.to(self.dtype), weight.inputs)

    def slabs(self, weight: Weight, gate: str | None = None, streams: bool = False) -> Slabs | None:
        """As `_checked`, counted as kept."""
        slabs = self._checked(weight, gate, streams)
        if slabs is not None:
            self.kept[slabs.form.name] += slabs.num_bytes
        return slabs

    def _checked(
        self, weight: Weight, gate: str | None = None, streams: bool = False
    ) -> Slabs | None:
        """None, and a warning: the weight is to be expanded. `streams`: for products of one
        weight alone, laid out for a streaming kernel where it holds."""
        streams = streams and has_hopper_kernels(self.device)
        slabs = slabs_of(weight, gate is not None, self.dtype if streams else None)
        if slabs is None:
            if not isinstance(weight, Dense):
                self._refuse(name_of(weight), "no kernel has numbers of its kind beside codes")
            return None
        key = (slabs.form, gate, slabs.order is not None, slabs.shape[1] % slabs.form.slab == 0)
        check = partial(self.check, weight, gate, self.dtype, slabs.form.lanes)
        if self._holds(key, check):
            return slabs
        why = str(self._verdicts[key])
        if not slabs.form.lanes:
            self._refuse(slabs.form.name, f"their packed kernel fails here: {why}")
            return None
        self._refuse_stream(slabs.form.name, why)
        return self._checked(weight, gate)

    def _holds(self, key: object, check: Callable[[], str | None]) -> bool:
        """Whether a kernel may be used, asked once for each key."""
        if key not in self._verdicts:
            self._verdicts[key] = failure_of(check)
        return self._verdicts[key] is None

    def expert_slabs(
        self, up: ExpertRows, down: ExpertRows, num_experts: int
    ) -> tuple[ExpertSlabs, ExpertSlabs] | None:
        """Of both products of a layer's experts; None: they are to be expanded."""
        made = [self._expert_slabs(rows, num_experts) for rows in (up, down)]
        if made[0] is None or made[1] is None:
            return None
        for part in (made[0], made[1]):
            self.kept[part.slabs.form.name] += part.num_bytes
        return made[0], made[1]

    def _expert_slabs(self, rows: ExpertRows, num_experts: int) -> ExpertSlabs | None:
        rows, orders = rows.unordered(num_experts)
        (weight, *others) = rows.weights
        if others:
            self._refuse_experts(rows)
            return None
        slabs = self._checked(weight)
        return None if slabs is None else ExpertSlabs(slabs, rows.bias, orders)

    def expert_bytes(
        self, up: ExpertRows, down: ExpertRows, num_experts: int, paired: bool
    ) -> tuple[ExpertBytes, ExpertBytes] | None:
        """Of both products of a layer's experts; None: the weights do not both ask for inputs of
        eight bits, or their products fail here. `paired`: rows of gate and up take turns."""
        forms = [self._eight_bit_form_of(rows) for rows in (up, down)]
        if forms[0] is None or forms[1] is None:
            return None
        made: list[ExpertBytes] = []
        for rows, form, turns in ((up, forms[0], paired), (down, forms[1], False)):
            part = expert_bytes(rows.weights[0], form, rows.bias, num_experts, turns)
            self.kept[form.name] += part.weight.num_bytes
            made.append(part)
        return made[0], made[1]

    def _eight_bit_form_of(self, rows: ExpertRows) -> EightBitForm | None:
        (weight, *others) = rows.weights
        form = None if others or weight.inputs == "float" else eight_bit_form(weight)
        if form is None:
            return None
        key = _key_of(form, weight)
        checks = (
            (key, self.check_eight_bit),
            ((*key, "experts"), self.check_grouped),
        )
        for each, check in checks:
            if not self._holds(each, partial(check, weight, form, self.dtype)):
                self._leave_inputs(form.name, str(self._verdicts[each]))
                return None
        return form

    def expanded(self, weight: Weight) -> Tensor:
        tensor = weight.dequantize().to(self.dtype)
        self.kept[str(self.dtype).removeprefix("torch.")] += tensor.numel() * tensor.element_size()
        return tensor

    def _part(self, weight: Weight, bias: Tensor | None, gate: str | None) -> SumKernel:
        if weight.inputs != "float":
            return self._rounded(weight, bias, gate)
        slabs = self.slabs(weight, gate, streams=True)
        if slabs is None:
            return MatmulLinear(self.expanded(weight), bias, self.layouts, gate)
        return PackedLinear(slabs, bias, self.layouts, self.scratch, self.dtype, gate)

    def _rounded(self, weight: Weight, bias: Tensor | None, gate: str | None) -> SumKernel:
        """Eight bits by eight where there is such a product; else the weight alone is packed."""
        form = eight_bit_form(weight)
        if form is not None:
            key = _key_of(form, weight)
            if self._holds(key, lambda: self.check_eight_bit(weight, form, self.dtype)):
                made = eight_bit_weight(weight, form, gate is not None)
                self.kept[form.name] += made.num_bytes
                return EightBitLinear(made, form.rounding, bias, gate, self.library)
            self._leave_inputs(form.name, str(self._verdicts[key]))
        kernel = self._part(as_it_is(weight), bias, gate)
        return Int8SumInputs(kernel) if weight.inputs == "int8-row" else kernel

    def _refuse_stream(self, form: str, why: str) -> None:
        if form in self.unstreamed:
            return
        self.unstreamed.add(form)
        warnings.warn(
            f"weights of form {form} are multiplied by a slower kernel: the streamed one fails here"
            f" ({why}); the results are the same",
            RuntimeWarning,
            stacklevel=2,
        )

    def _refuse_experts(self, rows: ExpertRows) -> None:
        if all(isinstance(weight, Dense) for weight in rows.weights):
            return
        names = ", ".join(sorted({name_of(weight) for weight in rows.weights}))
        why = "they are one product, and differ in form, in scales or in the order of their inputs"
        self._refuse(f"{names} of experts", why)

    def refuse_order(self, weight: Weight) -> None:
        why = "rows of an embedding are read in the order of their inputs, not of their scales"
        self._refuse(f"{name_of(weight)} of embeddings", why)

    def _refuse(self, form: str, why: str) -> None:
        if form in self.refused:
            return
        self.refused[form] = why
        warnings.warn(
            f"weights of form {form} are expanded to {self.dtype} ({why}); they take more memory,"
            " the results are the same",
            RuntimeWarning,
            stacklevel=2,
        )

    def _leave_inputs(self, form: str, why: str) -> None:
        if form in self.unrounded:
            return
        self.unrounded[form] = why
        warnings.warn(
            f"products of {form} fail here ({why}): weights stay packed and inputs are multiplied"
            f" in {self.dtype}; that is slower, and results are nearer to those of the floats",
            RuntimeWarning,
            stacklevel=2,
        )


def _key_of(form: EightBitForm, weight: Weight) -> tuple[object, ...]:
    """What products of eight by eight bits are checked for."""
    is_found = form.rounding.scale is None
    is_shared = form.group > 0 and isinstance(weight, Scaled) and weight.block[0] > 1
    return form.name, form.rounding.group, is_found, is_shared, weight.shape[1] % CHAIN == 0


def as_it_is(weight: Weight) -> Weight:
    """The same for inputs that somebody else rounds."""
    form: Any = weight  # forms are dataclasses, which their protocol does not say
    made_of: Weight = replace(form, inputs="float")
    return made_of


def name_of(weight: Weight) -> str:
    if isinstance(weight, Dense):
        return str(weight.tensor.dtype).removeprefix("torch.")
    slabs = slabs_of(weight.pick(slice(0, 64)))  # of fewer, scales may be alike
    if slabs is not None:
        return slabs.form.name
    assert isinstance(weight, Coded), f"got {weight}"
    return f"int{weight.bits} g{weight.block * weight.share}"


def has_order(weight: Weight) -> bool:
    """Whether columns of codes are for other inputs than their place says."""
    return isinstance(weight, Coded) and weight.order is not None


class PackedTable:
    """Rows of a packed weight."""

    def __init__(self, slabs: Slabs, dtype: torch.dtype) -> None:
        assert slabs.order is None, "columns of an embedding are in their own order"
        self.slabs, self.dtype = slabs, dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return embed_packed(self.slabs, ids, self.dtype)
