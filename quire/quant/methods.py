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
        "gptq": "quire.load.gptq:GptqReader",
        "awq": "quire.load.awq:AwqReader",
        "compressed-tensors": "quire.load.compressed:CompressedReader",
        "fp8": "quire.load.fp8:Fp8Reader",
        "fbgemm_fp8": "quire.load.fp8:Fp8Reader",
        "modelopt": "quire.load.fp8:ModelOptReader",
        "bitsandbytes": "quire.load.bitsandbytes:BitsAndBytesReader",
        "auto-round": "quire.load.auto_round:AutoRoundReader",
        "intel/auto-round": "quire.load.auto_round:AutoRoundReader",
        "mxfp4": "quire.load.gpt_oss:ExpertReader",
        "codebook": "quire.load.codebook:CodebookReader",
    },
)


def said_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of its weights; empty: nothing."""
    said = config.get("quantization_config") or config.get("compression_config") or {}
    return said if isinstance(said, Mapping) else {"quant_method": said}


def method_of(config: Mapping[str, Any]) -> str | None:
    """None: plain numbers. Raises NotSupported: such weights would load as noise, or not at all."""
    if not (said := said_of(config)):
        return None
    method = said.get("quant_method")
    if not isinstance(method, str) or method not in METHODS.entries:
        raise NotSupported(
            f"config.json: the weights are quantised (quant_method={shown(method)}), of which only"
            f" {', '.join(METHODS.entries)} are read; use one of these forms of the checkpoint, or"
            " bf16 or fp16"
        )
    return method


def stored_method(name: str) -> str | None:
    """The method of stored weights that a user's word means; None: it means no such thing.

    >>> stored_method("awq_marlin")
    'awq'
    """
    method = name.removesuffix("_marlin") if isinstance(name, str) else ""
    return method if method in METHODS.entries or method == "gguf" else None
