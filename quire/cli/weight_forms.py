"""The forms that a model's weights are in, layer by layer, and the bytes of each.

Of weights that stay as they are stored, `stored_forms.py` tells; of others, arithmetic. A decode
step reads all of them but embeddings, norms and experts that nobody visits, which is what
`layer_plan.py` bounds speed with.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from quire.models.spec import ModelSpec
    from quire.nn.parameter import Parameter
    from quire.quant.load_forms import LoadForm

EMBEDDING, HEAD, EXPERTS, LAYERS, OTHER = "embedding", "head", "experts", "layers", "other"
_LAYER = re.compile(r"\b(?:layers|h|blk)\.(\d+)\.")
_EMBEDS = re.compile(r"\b(embed|embed_tokens|wte|wpe|positions)\b")
_HEADS = re.compile(r"\b(lm_head|head|score)\b")
_SMALL = re.compile(r"norm|ln_|\.bias$|_bias$")  # nothing to speak of in a step
# How containers call plain numbers.
PLAIN = {"F32", "F16", "BF16", "F64", "float32", "float16", "bfloat16", "float64"}


class Held(NamedTuple):
    """One tensor of a model."""

    kind: str
    layer: int | None
    is_small: bool
    form: str
    num_bytes: int

    @staticmethod
    def of(name: str, form: str, num_bytes: int) -> Held:
        """
        >>> Held.of("model.layers.3.mlp.up_proj.weight", "Q4_K", 144)
        Held(kind='layers', layer=3, is_small=False, form='Q4_K', num_bytes=144)
        """
        found = _LAYER.search(name)
        if found is not None:
            kind = EXPERTS if ".experts." in name else LAYERS
        elif _EMBEDS.search(name):
            kind = EMBEDDING
        else:
            kind = HEAD if _HEADS.search(name) else OTHER
        is_small = _SMALL.search(name) is not None
        return Held(kind, int(found[1]) if found else None, is_small, form, num_bytes)


class PartForms(NamedTuple):
    where: str
    forms: dict[str, int]  # bytes by form, of all its layers

    @property
    def num_bytes(self) -> int:
        return sum(self.forms.values())


class StepWeights(NamedTuple):
    """Bytes that a step may read."""

    always: int
    experts: int  # of all of them


def made_forms(spec: ModelSpec, dtype: torch.dtype, form: LoadForm | None, name: str) -> list[Held]:
    """As they are expanded or, with a form of that name, rounded at load."""
    from quire.load.wish import Wish
    from quire.models.plan import empty_decoder

    wish, found = Wish(form=form), []
    for ours, parameter in empty_decoder(spec).parameters().items():
        own = wish.form_of(ours) if parameter.can_pack else None
        label = name if own == form else "8 bits"  # of embeddings and heads
        found.append(_made(ours, parameter, dtype, own, label))
    return found


def _made(
    ours: str, parameter: Parameter, dtype: torch.dtype, form: LoadForm | None, label: str
) -> Held:
    import torch

    num_bytes = parameter.num_elements * dtype.itemsize
    plain = Held.of(ours, str(dtype).removeprefix("torch."), num_bytes)
    num_in = parameter.shape[-1]
    made = None if form is None else form.of(torch.zeros(1, num_in))  # a row tells all rows' bytes
    if made is None:
        return plain
    rows = parameter.num_elements // num_in
    return plain._replace(form=label, num_bytes=made.num_bytes * rows)


def by_part(held: list[Held]) -> list[PartForms]:
    """Embedding, layers that are alike, head; what is left comes last."""
    parts: list[PartForms] = []
    for kind in (EMBEDDING, LAYERS, HEAD, OTHER):
        if kind == LAYERS:
            parts += _layer_parts([one for one in held if one.layer is not None])
        elif own := [one for one in held if one.kind == kind]:
            parts.append(PartForms("final norm" if kind == OTHER else kind, _forms(own)))
    return parts


def _layer_parts(held: list[Held]) -> Iterator[PartForms]:
    layers = sorted({one.layer for one in held if one.layer is not None})
    of_layer = {layer: _forms([one for one in held if one.layer == layer]) for layer in layers}
    for _, run in groupby(layers, lambda layer: sorted(of_layer[layer].items())):
        same = list(run)
        name = f"layer {same[0]}" if len(same) == 1 else f"layers {same[0]}-{same[-1]}"
        forms = of_layer[same[0]]
        yield PartForms(name, {form: size * len(same) for form, size in forms.items()})


def _forms(held: list[Held]) -> dict[str, int]:
    sizes = Counter[str]()
    for one in held:
        sizes[one.form] += one.num_bytes
    return dict(sizes.most_common())


def step_weights(held: list[Held], tied: bool) -> StepWeights:
    """The head is the embedding where they are tied; of other embeddings a step reads a row."""
    always = experts = 0
    for one in held:
        if one.is_small or (one.kind == EMBEDDING and not tied):
            continue
        if one.kind == EXPERTS:
            experts += one.num_bytes
        elif not (one.kind == HEAD and tied):  # a second copy is not loaded
            always += one.num_bytes
    return StepWeights(always, experts)


def totals(held: list[Held]) -> Mapping[str, int]:
    """Bytes by form."""
    return _forms(held)
