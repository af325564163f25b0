"""config.json of a model that has become smaller, and the check that it says nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from quire.compress.files import config_of
from quire.compress.shrink.choice import Choice
from quire.compress.shrink.sizes import Sizes
from quire.compress.source import Source
from quire.errors import NotSupported
from quire.models.registry import spec_of
from quire.models.spec import ModelSpec
from quire.models.windows import FULL, LOCAL

TEXT = "text_config"  # of a model that has other parts


def smaller_config(source: Source, sizes: Sizes, choice: Choice) -> dict[str, Any]:
    """Raises NotSupported where a config cannot say it."""
    config = config_of(source, {})
    inner = config.get(TEXT)
    changed = _changed(inner if isinstance(inner, Mapping) else config, source.spec, sizes, choice)
    made = {**config, TEXT: changed} if isinstance(inner, Mapping) else changed
    _check(spec_of(made), source.spec, sizes, choice)
    return made


def _changed(
    config: Mapping[str, Any], spec: ModelSpec, sizes: Sizes, choice: Choice
) -> dict[str, Any]:
    made = {
        **config,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.mlp,
        "hidden_size": sizes.hidden,
    }
    if spec.mla is None and (sizes.hidden != sizes.heads * spec.head_dim or "head_dim" in config):
        made["head_dim"] = spec.head_dim
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        made["layer_types"] = [kinds[layer.old] for layer in choice.layers]
    elif len(set(spec.windows)) > 1:
        windows = [spec.windows[layer.old] for layer in choice.layers]
        made["layer_types"] = [FULL if window is None else LOCAL for window in windows]
    return made


def _check(made: ModelSpec, spec: ModelSpec, sizes: Sizes, choice: Choice) -> None:
    """Every layer must be read as it was."""
    windows = tuple(spec.window_of(layer.old) for layer in choice.layers)
    moe = spec.moe
    if moe is not None:
        dense = [i for i, layer in enumerate(choice.layers) if layer.old in moe.dense_layers]
        moe = replace(moe, dense_layers=frozenset(dense))
        made_moe = made.moe
        if made_moe is not None:  # beyond the last layer nothing is said
            inside = frozenset(i for i in made_moe.dense_layers if i < sizes.layers)
            made = replace(made, moe=replace(made_moe, dense_layers=inside))
    want = replace(
        spec,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        ffn_size=sizes.mlp,
        hidden_size=sizes.hidden,
        windows=windows if any(windows) else (),
        embed_scale=made.embed_scale,  # weights make up for it
        moe=moe,
    )
    for field in fields(ModelSpec):
        if getattr(made, field.name) != getattr(want, field.name):
            raise NotSupported(
                f"config.json of {spec.architecture} cannot say what is left: {field.name} would be"
                f" {getattr(made, field.name)}, want {getattr(want, field.name)}; take other layers"
                " or widths"
            )
