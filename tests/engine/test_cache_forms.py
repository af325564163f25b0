"""An engine whose cache keeps codes: tokens depend on the request alone, and more of them fit.

Oracle: the same request alone, nothing cached, in one chunk and one page size. Turns red when a
page is copied without its scales, a prefix is read in another form than it was written in, or a
row's codes follow what lies beside it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from quire.attn.backend import AttnSpec
from quire.attn.reference import ReferenceAttention
from quire.engine.build import Engine
from quire.errors import NotSupported
from quire.kv.forms import FLOAT32, INT8
from quire.kv.groups import layer_groups
from quire.kv.spec import CacheSpec, KvShape
from quire.memory.pool import PagePool
from quire.params import SamplingParams
from quire.request import Request
from tests.engine.tiny import random_llama
from tests.hf import VOCAB, tiny_engine, tiny_model
from tests.model.test_deepseek import model_of

FORMS = ["int8", "fp8", "int4"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.7)
ENGINES: dict[str, dict[str, Any]] = {
    "full batch": {"max_num_seqs": 30, "max_num_batched_tokens": 2048},
    "chunks of 3": {"max_chunk": 3},
    "small steps": {"max_num_batched_tokens": 11, "max_num_seqs": 8},
    "pages of 1": {"page_size": 1},
    "pages of 32": {"page_size": 32},
    "no prefix cache": {"enable_prefix_caching": False},
    "layer by layer": {"enforce_eager": True},
    "three threads": {"num_threads": 3},
}


@cache
def latent_model() -> Any:
    return model_of("v2-lite")


@cache
def model(family: str) -> Any:
    if family == "llama-32":  # heads that the native library keeps in every form
        return random_llama(head_dim=32, vocab_size=VOCAB)
    return tiny_model(family)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    base = [rng.randrange(3, VOCAB) for _ in range(48)]
    own = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 5, 33, 60)]
    return [*own, base, list(base), base + own[1]]


def everyone() -> list[Request]:
    return [Request.new(i, p, PARAMS, seed=50 + i) for i, p in enumerate(prompts())]


def outputs(engine: Engine, requests: Sequence[Request]) -> dict[int, list[int]]:
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    assert engine.core.scheduler.kv.allocator.num_live == 0
    return {request.id: request.output for request in requests}


@cache
def alone(family: str, form: str) -> dict[int, list[int]]:
    words = {"page_size": 16, "enable_prefix_caching": False, "max_num_seqs": 1}
    engine = tiny_engine(model(family), kv_cache_dtype=form, **words)
    found: dict[int, list[int]] = {}
    for request in everyone():
        found |= outputs(engine, [request])
    return found


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("form", FORMS)
def test_tokens_do_not_depend_on_the_engine(form: str, name: str) -> None:
    engine = tiny_engine(model("llama-32"), kv_cache_dtype=form, **ENGINES[name])
    assert outputs(engine, everyone()) == alone("llama-32", form)


@pytest.mark.parametrize(
    ("form", "family"), [("int8", "gemma2"), ("fp8", "mistral-window"), ("int4", "mistral-window")]
)
def test_windows_caps_and_torchs_own_attention(form: str, family: str) -> None:
    """Heads of 16: int4 is left to torch's backend. Windows give pages back and take others."""
    engine = tiny_engine(model(family), kv_cache_dtype=form, max_chunk=7, page_size=4)
    assert outputs(engine, everyone()) == alone(family, form)


@pytest.mark.parametrize("form", FORMS)
def test_hits_copies_and_preemption(form: str) -> None:
    """Red when a copied page lacks its scales, or a request comes back to other numbers."""
    whole = tiny_engine(model("llama-32"), kv_cache_dtype=form)
    pool = whole.runner.pool
    memory = 30 * pool.data.nbytes // pool.num_pages
    small = tiny_engine(
        model("llama-32"), kv_cache_dtype=form, kv_cache_memory=memory, max_model_len=80
    )
    for engine in (whole, small):
        assert outputs(engine, everyone()) == alone("llama-32", form)
        again = everyone()
        assert outputs(engine, again) == alone("llama-32", form)
        if engine is whole:
            assert all(r.num_cached for r in again if r.num_prompt > 4)
    assert small.core.scheduler.stats().num_preempted > 0
    copies = [Request.new(i, prompts()[3], PARAMS, seed=50 + i) for i in range(4)]
    copies[0].children = copies[1:]
    outputs(whole, copies[:1])
    apart = tiny_engine(model("llama-32"), kv_cache_dtype=form, enable_prefix_caching=False)
    for copy in copies:
        lone = Request.new(copy.id, prompts()[3], PARAMS, seed=50 + copy.id)
        assert outputs(apart, [lone]) == {copy.id: copy.output}


def test_forms_are_close_to_floats() -> None:
    """Red when codes are decoded as something else: greedy tokens of int8 are mostly the same."""
    greedy = PARAMS.with_(temperature=0.0)
    said = {}
    for form in ("auto", "int8", "fp8", "int4"):
        engine = tiny_engine(model("llama-32"), kv_cache_dtype=form)
        requests = [Request.new(i, p, greedy) for i, p in enumerate(prompts())]
        said[form] = [token for tokens in outputs(engine, requests).values() for token in tokens]
    same = {f: sum(map(int.__eq__, said[f], said["auto"])) / len(said["auto"]) for f in FORMS}
    assert same["int8"] > 0.8 and same["fp8"] > 0.6 and said["int4"] != said["int8"]


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_latents(form: str, backend: str) -> None:
    """Red when a page of latents is misread, or an answer follows the schedule."""
    words = {"kv_cache_dtype": form, "attention_backend": backend, "enable_prefix_caching": False}
    one, more = (
        tiny_engine(latent_model(), max_num_seqs=n, max_chunk=c, **words)
        for n, c in ((1, 0), (8, 7))
    )
    floats = tiny_engine(latent_model(), **(words | {"kv_cache_dtype": "auto"}))
    found: dict[int, list[int]] = {}
    for request in everyone():
        found |= outputs(one, [request])
    if backend == "cpu":
        assert outputs(more, everyone()) == found
    shape, pool = one.runner.pool.cache.shape, one.runner.pool
    assert pool.cache.layer_bytes(0) == shape.width + 2 * 2
    near = outputs(floats, everyone())
    same = sum(a == b for i in found for a, b in zip(found[i], near[i], strict=True))
    assert same > 0.6 * sum(map(len, found.values()))


def test_latents_in_four_bits_are_refused() -> None:
    with pytest.raises(NotSupported, match=r"kv_cache_dtype='int4'.*latents.*'int8' or 'fp8'"):
        tiny_engine(latent_model(), kv_cache_dtype="int4")


# ------------------------------------------------------------ memory


@pytest.mark.parametrize(("form", "least"), [("int8", 3.7), ("fp8", 3.7), ("int4", 7.1)])
def test_more_tokens_in_the_same_memory(form: str, least: float) -> None:
    """Against fp32: scales cost 2 bytes of 32 + 2, or of 16 + 2."""
    words = {"kv_cache_memory": 1 << 20, "max_num_seqs": 64}
    pages = [
        tiny_engine(model("llama-32"), kv_cache_dtype=f, **words).runner.pool.num_pages
        for f in ("auto", form)
    ]
    assert pages[1] / pages[0] > least
    engine = tiny_engine(model("llama-32"), kv_cache_dtype=form, **words)
    pool = engine.runner.pool
    assert pool.data.nbytes == pool.num_pages * pool.cache.page_bytes <= 1 << 20
    (told,) = [d for d in engine.decisions if d.what == "kv cache"]
    assert f" of {form}, {pool.cache.token_bytes} bytes a token" in told.value


def test_layers_left_out() -> None:
    """Red when a layer that keeps floats is coded, or shares a place whose pages are too small."""
    engine = tiny_engine(model("gemma2"), kv_cache_dtype="int8", kv_cache_dtype_skip_layers=(0,))
    pool = engine.runner.pool
    dtypes = [pool.layer(i).keys.dtype for i in range(4)]
    assert dtypes == [torch.float32, torch.uint8, torch.uint8, torch.uint8]
    assert pool.data.nbytes == pool.num_pages * pool.cache.page_bytes
    words = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("sliding_window", "1")}
    alone_ = tiny_engine(model("gemma2"), enable_prefix_caching=False, max_num_seqs=1, **words)
    some = tiny_engine(model("gemma2"), max_chunk=5, **words)
    want: dict[int, list[int]] = {}
    for request in everyone():
        want |= outputs(alone_, [request])
    assert outputs(some, everyone()) == want
    coded = [some.runner.pool.layer(i).form.is_coded for i in range(4)]
    assert coded == [False, False, False, True]
    with pytest.raises(NotSupported, match=r"'9' is no layer; want numbers from 0 to 3"):
        tiny_engine(model("gemma2"), kv_cache_dtype="int8", kv_cache_dtype_skip_layers=("9",))


def test_copies_of_pages_with_several_forms() -> None:
    """Red when copy-on-write misses a place, or a place's scales."""
    groups = layer_groups((), 3)
    spec = AttnSpec(2, 2, 6, 1.0, page_size=4)
    cache = CacheSpec(KvShape(2, 6), groups, 4, FLOAT32, INT8, frozenset({1}))
    assert cache.page_bytes == 2 * 4 * 2 * (2 * (6 + 2) + 4 * 6)
    pool = PagePool(ReferenceAttention(), spec, cache, 5, torch.device("cpu"))
    for layer in range(3):
        for part in pool.layer(layer)[:2]:
            part[2] = 7
    assert (pool.data != 0).sum() > 0
    pool.copy(torch.tensor([2]), torch.tensor([4]))
    for layer in range(3):
        for part in pool.layer(layer)[:2]:
            assert (part[4] == 7).all() and not part[[0, 1, 3]].any()
