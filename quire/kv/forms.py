"""CacheForm: how the cache keeps one number, as floats or as codes that share a scale.

A token's head is one row of codes with a scale of its own, so a row never depends on its
neighbours. int4 rows are rotated first: a Hadamard transform spreads what few dimensions have over
all of them, and keys of many models have such dimensions. `spec.py` counts the bytes,
`attn/cache_codes.py` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import NotSupported

SCALE_BYTES = 2  # a bf16, rounded up, so that no code is beyond the largest


@dataclass(frozen=True, slots=True)
class CacheForm:
    name: str
    bits: int  # of one number
    top: float = 0.0  # code of the largest magnitude a scale allows; 0: floats, without scales
    rotates: bool = False

    @property
    def is_coded(self) -> bool:
        return self.top > 0

    def row_bytes(self, width: int, num_scales: int = 1) -> int:
        """Bytes of `width` numbers that share so many scales."""
        return -(-width * self.bits // 8) + (num_scales * SCALE_BYTES if self.is_coded else 0)


FLOAT32 = CacheForm("float32", 32)
INT8 = CacheForm("int8", 8, 127.0)
FP8 = CacheForm("fp8", 8, 448.0)  # E4M3, without infinities
INT4 = CacheForm("int4", 4, 7.5, rotates=True)  # codes 0..15 stand for -7.5 .. 7.5
FLOATS = {
    "float32": FLOAT32,
    "float16": CacheForm("float16", 16),
    "bfloat16": CacheForm("bfloat16", 16),
}
CODED = {"int8": INT8, "fp8": FP8, "int4": INT4}

# What users and vLLM call them -> our name. "auto" is decided later, from weights and device.
WORDS = {
    "auto": "auto",
    "int8": "int8",
    "int8_per_token_head": "int8",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_per_token_head": "fp8",
    "int4": "int4",
    "int4_per_token_head": "int4",
}
OWN_SCALES = "_per_token_head"  # ... and never a checkpoint's
REFUSED = {
    "fp8_e5m2": "its two bits of fraction lose more than int8 of the same size",
    "fp8_inc": "it is for Gaudi accelerators",
    "fp8_ds_mla": "latents have a scale for each part of a token in fp8 and int8",
    "nvfp4": "four bits are kept as whole numbers",
    "float16": "floats are kept in the dtype that suits the weights",
    "bfloat16": "floats are kept in the dtype that suits the weights",
    "float32": "floats are kept in the dtype that suits the weights; dtype='float32' is the"
    " reference mode",
}


def parse_cache_dtype(word: object) -> str:
    """Our name of a form, or "auto". Raises NotSupported.

    >>> parse_cache_dtype("fp8_e4m3")
    'fp8'
    """
    if isinstance(word, str) and word in WORDS:
        return WORDS[word]
    why = REFUSED.get(word) if isinstance(word, str) else None
    raise NotSupported(
        f"got kv_cache_dtype={word!r}" + (f": {why}" if why else "") + "; want 'auto', 'int8',"
        " 'fp8' (also 'fp8_e4m3') or 'int4'"
    )


def rotation_of(form: CacheForm, head_dim: int) -> int:
    """Numbers that are rotated together, the largest power of two that divides a head; 1: none.

    >>> rotation_of(INT4, 64), rotation_of(INT4, 96), rotation_of(INT8, 64)
    (64, 32, 1)
    """
    return head_dim & -head_dim if form.rotates else 1
