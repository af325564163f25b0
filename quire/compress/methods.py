"""The methods of `quire quantize`: one table, a line for each pass. `gguf` is a file format of its
own (`gguf_export.py`)."""

from __future__ import annotations

from quire.registry import Registry

PASSES = Registry(
    "quantisation method",
    {
        "rtn": "quire.compress.passes.rtn:Rtn",
        "smoothquant": "quire.compress.passes.smoothquant:SmoothQuant",
        "gptq": "quire.compress.passes.gptq:Gptq",
        "awq": "quire.compress.passes.awq:Awq",
        "fp8": "quire.compress.passes.fp8:Fp8",
        "nf4": "quire.compress.passes.nf4:Nf4",
        "codebook": "quire.compress.passes.codebook:CodebookPass",
        "mxfp4": "quire.compress.passes.fp4:Mxfp4",
        "nvfp4": "quire.compress.passes.fp4:Nvfp4",
    },
)
METHODS = (*PASSES.entries, "gguf")
