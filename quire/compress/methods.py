"""The methods of `quire quantize` and `quire prune`: two tables, a line for each pass. `gguf` is a
file format of its own (`gguf_export.py`), and `shrink` changes the shape of a model (`shrink/`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.registry import Registry

if TYPE_CHECKING:
    from quire.compress.passes.recipe import Pass

QUANTISERS = Registry(
    "quantisation method",
    {
        "rtn": "quire.compress.passes.rtn:Rtn",
        "smoothquant": "quire.compress.passes.smoothquant:SmoothQuant",
        "gptq": "quire.compress.passes.gptq:Gptq",
        "awq": "quire.compress.passes.awq:Awq",
        "fp8": "quire.compress.passes.gptq_fp8:GptqFp8",
        "gptq-fp8": "quire.compress.passes.gptq_fp8:GptqFp8",  # what it was called before
        "rtn-fp8": "quire.compress.passes.fp8:Fp8",
        "nf4": "quire.compress.passes.nf4:Nf4",
        "codebook": "quire.compress.passes.codebook:CodebookPass",
        "mxfp4": "quire.compress.passes.fp4:Mxfp4",
        "nvfp4": "quire.compress.passes.fp4:Nvfp4",
    },
)
PRUNERS = Registry(
    "pruning method",
    {
        "magnitude": "quire.compress.passes.magnitude:Magnitude",
        "wanda": "quire.compress.passes.wanda:Wanda",
        "sparsegpt": "quire.compress.passes.sparsegpt:SparseGpt",
    },
)
METHODS = (*QUANTISERS.entries, "gguf")
ALL = (*METHODS, *PRUNERS.entries, "shrink")


def pass_of(method: str) -> type[Pass]:
    """Raises NotSupported for a name nobody knows."""
    known = PRUNERS if method in PRUNERS.entries else QUANTISERS
    found: type[Pass] = known.get(method)
    return found


def usually_kept(method: str) -> tuple[str, ...]:
    """What stays as it is unless a user says otherwise. GGUF has types of more bits for heads."""
    return () if method in ("gguf", "shrink") else ("lm_head",)
