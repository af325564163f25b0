"""The ways checkpoints say their weights are quantised: one table, keyed by their own word.

A method is what config.json calls `quant_method`. Its line names the reader that makes weights of
what is stored (`load/unpack.py` says what a reader is). GGUF files say it of each tensor
(`gguf_codes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import NotSupported, shown
from quire.registry import Registry

METHODS = Registry(
    "quantisation method",
    {
        "bitnet": "quire.load.ternary:TernaryReader",
        "mxfp4": "quire.load.gpt_oss:ExpertReader",
    },
)


def method_of(config: Mapping[str, Any]) -> str | None:
    """None: plain numbers. Raises NotSupported: such weights would load as noise, or not at all."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not said:
        return None
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    if not isinstance(method, str) or method not in METHODS.entries:
        raise NotSupported(
            f"config.json: the weights are quantised (quant_method={shown(method)}), of which only"
            f" {' and '.join(METHODS.entries)} are read so far; use a bf16 or fp16 form of the"
            " checkpoint"
        )
    return method
