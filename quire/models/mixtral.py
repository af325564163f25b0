"""Mixtral: Mistral whose feed-forward blocks are a few of many experts, softmax over all of them
first and the chosen weights made to sum to one."""

from __future__ import annotations

from dataclasses import replace

from quire.models import mistral, names
from quire.models.spec import Config, ModelSpec, MoeSpec, RouterSpec

NAMES = names.MIXTRAL


def spec(config: Config) -> ModelSpec:
    base = mistral.spec(config)
    router = RouterSpec(config.count("num_local_experts"), config.count("num_experts_per_tok"))
    return replace(base, architecture="mixtral", moe=MoeSpec(router, base.ffn_size))
