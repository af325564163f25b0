"""Sizes: how large the model is to become, checked against how large it is and how it is built."""

from __future__ import annotations

from dataclasses import dataclass

from quire.compress.passes.recipe import OPTIONS, Recipe
from quire.errors import BadRequest, NotSupported
from quire.models.spec import ModelSpec

FIELDS = ("layers", "heads", "kv_heads", "mlp", "hidden")


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int
    heads: int
    kv_heads: int
    mlp: int  # channels of a feed-forward block
    hidden: int

    @staticmethod
    def before(spec: ModelSpec) -> Sizes:
        return Sizes(
            spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.ffn_size, spec.hidden_size
        )

    @staticmethod
    def of(recipe: Recipe, spec: ModelSpec) -> Sizes:
        """Raises BadRequest or NotSupported."""
        whole = Sizes.before(spec)
        asked = {name: getattr(recipe, name) for name in FIELDS}
        if all(size is None for size in asked.values()):
            options = ", ".join(OPTIONS[name] for name in FIELDS)
            raise BadRequest(f"nothing is to shrink; give one of {options}")
        for name, size in asked.items():
            most = getattr(whole, name)
            if size is not None and not 1 <= size <= most:
                raise BadRequest(
                    f"got {OPTIONS[name]} {size}, want 1 to {most}, which the model has", param=name
                )
        each = whole.heads // whole.kv_heads
        kv_heads = asked["kv_heads"] or whole.kv_heads
        heads = asked["heads"] or kv_heads * each
        if heads % kv_heads or heads // kv_heads > each:
            fits = ", ".join(str(kv_heads * n) for n in range(1, each + 1))
            raise BadRequest(
                f"got --heads {heads} for {kv_heads} kv heads, which each serve as many and at most"
                f" {each}: take one of {fits}",
                param="heads",
            )
        made = Sizes(
            asked["layers"] or whole.layers,
            heads,
            kv_heads,
            asked["mlp"] or whole.mlp,
            asked["hidden"] or whole.hidden,
        )
        _check_kind(made, whole, spec)
        return made


def _check_kind(made: Sizes, whole: Sizes, spec: ModelSpec) -> None:
    """Widths of attention and feed-forward blocks as all families have them, and no others."""
    if made.hidden != whole.hidden and (spec.norm != "rms" or spec.norm_after):
        raise NotSupported(
            f"got --hidden {made.hidden}, which {spec.architecture} cannot have: only streams that"
            " an RMS norm reads become narrower; take --mlp, --heads or --layers"
        )
    has_width = made.heads != whole.heads or made.mlp != whole.mlp or made.hidden != whole.hidden
    if has_width and (spec.moe is not None or spec.mla is not None):
        kind = "experts" if spec.moe is not None else "latent attention"
        raise NotSupported(
            f"{spec.architecture} has {kind}, whose widths are not cut here; take --layers"
        )
    if made.heads != whole.heads and spec.qk_norm == "width":
        raise NotSupported(
            f"{spec.architecture} norms all heads of queries and keys together, so none can go;"
            " take --mlp or --layers"
        )
