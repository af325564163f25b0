"""Phi-3 and Phi-4 mini: Llama with q|k|v and gate|up stored fused, rotary on part of each head in
some versions, and a sliding window in others."""

from __future__ import annotations

from dataclasses import replace

from quire.models import mistral, names
from quire.models.spec import Config, ModelSpec

NAMES = names.PHI3


def spec(config: Config) -> ModelSpec:
    return replace(mistral.spec(config), architecture="phi3")
