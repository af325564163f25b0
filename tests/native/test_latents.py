"""Native latent attention over several spans: fp64 on the cache's own numbers, and equal bits.

What every latent backend promises is `tests/attn/test_latent_backends.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attn.backend import LayerCache
from quire.attn.latent_native import LatentNative
from quire.attn.select import select_backend
from quire.native.head_product import NativeHeads
from quire.native.library import Library
from quire.ops.torch_ops import TorchOps
from tests.latent_case import LatentCase, Sizes, make_latent_case

LENS = [300, 33, 1, 130]  # spans are 128 keys
KINDS = {
    "few heads": Sizes(heads=4),
    "odd heads": Sizes(heads=11, rank=48, rope=32),
    "many heads": Sizes(heads=80, rank=16, rope=16),
    "wide": Sizes(heads=2, rank=512, rope=64),
}


def cache_of(case: LatentCase, backend: LatentNative) -> LayerCache:
    return LayerCache(*(part.to(backend.cache_dtype) for part in case.cache(backend)[:2]))


def rounded(case: LatentCase, dtype: torch.dtype) -> LatentCase:
    """With latents as the cache keeps them; keys are rotated first."""
    tokens = [of._replace(latent=of.latent.to(dtype).float()) for of in case.tokens]
    return replace(case, tokens=tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, dtype: torch.dtype, library: Library) -> None:
    """Red when a row is missed, seen too early, or weighed differently in other company."""
    case, backend = make_latent_case(LENS, KINDS[kind]), LatentNative(dtype)
    whole = case.step(backend, cache_of(case, backend), LENS, LENS)
    want = rounded(case, dtype).expected(LENS, LENS)
    near = 1e-4 if dtype == torch.float32 else 5e-3  # rotated keys are rounded too
    torch.testing.assert_close(whole.double(), want, rtol=near, atol=near)
    for isa, threads in ((library.isas[0], 3), *((isa, 1) for isa in library.isas[1:])):
        library.use_isa(isa)
        library.set_threads(threads)
        cache = cache_of(case, backend)
        assert torch.equal(case.step(backend, cache, LENS, LENS), whole), (isa, threads)
        for keys in (1, 127, 128, 129, 257, 300):  # alone, its spans dealt out
            got = case.step(backend, cache, [1], [keys])
            assert torch.equal(got[0], whole[keys - 1]), (isa, threads, keys)
        assert torch.equal(case.step(backend, cache, [5], [260]), whole[255:260])


def test_a_broken_latent_makes_no_number(library: Library) -> None:
    """Red when it has no weight, and the query a plausible answer."""
    case, backend = make_latent_case([200]), LatentNative()
    case.tokens[0].latent[150, 3] = float("nan")
    out = case.step(backend, cache_of(case, backend), [200], [200])
    assert out[150:].isnan().all() and out[:150].isfinite().all()


@pytest.mark.parametrize("rest", [0, 16])
def test_heads_by_weights_of_their_own(rest: int, library: Library) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(5, 40, 24).transpose(1, 2), torch.randn(150, 5, 40 + rest)
    native, plain = NativeHeads(weight, library), TorchOps().head_product(weight)
    got = native(x)
    torch.testing.assert_close(got, plain(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(got[..., 24:], x[..., 40:])
    library.set_threads(3)
    assert torch.equal(native(x), got)
    assert torch.equal(native(x[7:10]), got[7:10])


def test_who_has_it(library: Library) -> None:
    spec = make_latent_case([1]).spec
    assert select_backend(None, torch.device("cpu"), torch.float32, spec)[0] == "native"
    odd = replace(spec, value_dim=24, head_dim=48)
    assert select_backend(None, torch.device("cpu"), torch.float32, odd)[0] == "cpu"
