"""OLMo 2: Llama that norms what blocks add instead of what they read, and q and k as a whole."""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec

NAMES = names.OLMO2


def spec(config: Config) -> ModelSpec:
    return replace(llama.spec(config), architecture="olmo2", qk_norm="width", norm_after=True)
