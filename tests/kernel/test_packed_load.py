"""Models whose kernels CudaOps makes of packed weights, on a CPU: nothing is launched.

What a GPU would meet at load, as far as it can be met without one: fused parts, tied heads,
experts, latent attention.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from quire.load.loader import fill_random
from quire.load.wish import Wish
from quire.models.decoder import Decoder, heads_of
from quire.models.registry import spec_of
from quire.models.tiny_configs import tiny_config
from quire.ops.cuda_ops import CudaOps
from quire.quant.load_forms import load_form

CPU = torch.device("cpu")
FAMILIES = ("llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_oss")


def _made(family: str, form: str, why: str | None) -> CudaOps:
    spec = spec_of(tiny_config(family))
    ops = CudaOps(CPU, torch.bfloat16)
    ops.packed.check = lambda *_: why
    with torch.inference_mode():
        model = Decoder(spec, heads_of(spec, 16), 64, torch.bfloat16, CPU)
        fill_random(model, 0, Wish(form=load_form(form)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            model.finish(ops)
    return ops


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["rtn-int4-g32-asym", "fp8"])
def test_every_product_is_packed(family: str, form: str) -> None:
    """Red when a part of a model is expanded, or its weights cannot be brought together."""
    ops = _made(family, form, None)
    assert set(ops.packed.kept) - {"bfloat16"} and not ops.packed.refused
    packed = sum(n for name, n in ops.packed.kept.items() if name != "bfloat16")
    refused = _made(family, form, "refused by a test").packed
    assert set(refused.kept) == {"bfloat16"} and refused.refused
    assert packed < 0.75 * refused.kept["bfloat16"]
