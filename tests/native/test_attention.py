"""Native attention against fp64 on the cache's own numbers, over shuffled pages and several spans.

A query's bits are the same on every instruction set, with any number of threads, alone or in a
chunk, recorded or at once. What is rounded to fp16 is the cache, and nothing else.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from quire.attn import native
from quire.attn.backend import LayerCache
from quire.attn.native import NativeAttention
from quire.attn.select import select_backend
from quire.errors import NotSupported
from quire.native.heads import StepPointers
from quire.native.library import Found, Library
from quire.native.tape import Rows, Tape
from tests.paged_case import PLAIN, PagedCase, make_case

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"heads": (4, 2), "head_dim": 32},
    "three queries a kv head": {"heads": (9, 3), "head_dim": 64},
    "more heads than scores are held of": {"heads": (70, 1), "head_dim": 16},
    "wide and odd": {"heads": (2, 1), "head_dim": 208},
    "window": {"heads": (4, 2), "head_dim": 32, "window": 21},
    "window over spans": {"heads": (4, 2), "head_dim": 32, "window": 150},
    "window of one": {"heads": (4, 2), "head_dim": 32, "window": 1},
    "cap": {"heads": (4, 2), "head_dim": 32, "softcap": 5.0},
    "sinks": {"heads": (4, 2), "head_dim": 32, "has_sinks": True},
    "all": {"heads": (4, 1), "head_dim": 48, "window": 200, "softcap": 3.0, "has_sinks": True},
    "pages of 4": {"heads": (4, 2), "head_dim": 32, "page_size": 4},
    "pages of 64": {"heads": (4, 2), "head_dim": 32, "page_size": 64},
}
LENS = [300, 33, 1, 130]  # spans are 128 keys; every last page is odd
DTYPES = (torch.float32, torch.float16)


def cache_of(case: PagedCase, backend: NativeAttention) -> LayerCache:
    return LayerCache(*(part.to(backend.cache_dtype) for part in case.cache(backend)[:2]))


def rounded(case: PagedCase, dtype: torch.dtype) -> PagedCase:
    """The same with keys and values as the cache keeps them."""
    width = case.spec.num_heads * case.spec.head_dim
    parts = ((x[:, :width], x[:, width:].to(dtype).float()) for x in case.qkv)
    return replace(case, qkv=[torch.cat(both, 1) for both in parts])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, dtype: torch.dtype, library: Library) -> None:
    """Red when a key is missed, seen too early, or weighed differently in other company."""
    case, backend = make_case(LENS, **KINDS[kind]), NativeAttention(dtype)
    cache = cache_of(case, backend)
    whole = case.step(backend, cache, LENS, LENS)
    want = rounded(case, dtype).expected(LENS, LENS)
    torch.testing.assert_close(whole.double(), want, rtol=1e-5, atol=1e-5)
    for isa, threads in itertools.product(library.isas, (1, 2)):
        library.use_isa(isa)
        library.set_threads(threads)
        for end in (1, 41, 128, 129, 300):
            alone = case.step(backend, cache, [1], [end])
            assert torch.equal(alone[0], whole[end - 1]), (isa, threads, end)
        some = case.step(backend, cache, [59, 1, 1], [300, 33, 1])
        assert torch.equal(some[:60], torch.cat((whole[241:300], whole[332:333]))), (isa, threads)


@pytest.mark.parametrize("chunk", [1, 3, 50, 129])
@pytest.mark.parametrize("kind", ["three queries a kv head", "all"])
def test_chunks_change_no_bit(kind: str, chunk: int, library: Library) -> None:
    """Red when a span's border, or who joins its parts, follows the step."""
    library.set_threads(2)
    case, backend = make_case([700], **KINDS[kind]), NativeAttention(torch.float16)
    cache = cache_of(case, backend)
    whole = case.step(backend, cache, [700], [700])
    cuts = [*range(371, 700, chunk), 700]
    parts = [case.step(backend, cache, [b - a], [b]) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole[371:])


def test_a_tape_replays_the_same(library: Library) -> None:
    """Red when what is recorded is another operation than what runs layer by layer."""
    case, backend = make_case(LENS, **KINDS["all"]), NativeAttention(torch.float16)
    batch, qkv = case.batch(LENS, LENS, range(len(LENS))), torch.cat(case.qkv)
    want = case.step(backend, cache_of(case, backend), LENS, LENS)
    tape, cache = Tape(library, len(qkv)), cache_of(case, backend)
    given = tape.rows(qkv.shape[1], False)
    given.memory.view(qkv.shape).copy_(qkv)
    q = backend.prepare(cast("Tensor", given), PLAIN, cache, 0, case.spec)
    out = cast("object", backend.run(q, cache, 0, case.spec, case.sinks))
    assert isinstance(out, Rows)
    tape.end()
    pointers = StepPointers(1)
    tape.replay(pointers.step((batch,)))
    assert torch.equal(out.memory.view(want.shape), want)


@pytest.mark.parametrize("page_size", [4, 16, 32])
def test_keys_lie_with_tokens_as_lanes(page_size: int, library: Library) -> None:
    """Red when the layout of the cache is another than quire_native.h says."""
    case = make_case([37], heads=(2, 2), head_dim=16, page_size=page_size)
    backend = NativeAttention()
    cache = cache_of(case, backend)
    case.feed(backend, cache, [37])
    run = min(page_size, 16)
    keys = cache.keys.view(case.num_pages, 2, page_size // run, 16, run).transpose(3, 4)
    values = cache.values.view(case.num_pages, 2, page_size, 16)
    slots = case.batch([37], [37], [0]).slots
    for part, first in ((keys, 2), (values, 4)):  # of the heads in qkv
        found = part.reshape(case.num_pages, 2, page_size, 16).transpose(1, 2).flatten(0, 1)[slots]
        assert torch.equal(found, case.qkv[0].view(37, 6, 16)[:, first : first + 2])


def test_rounding_to_fp16(library: Library) -> None:
    """Red when an instruction set rounds otherwise, or a large number becomes infinite."""
    case = make_case([1], heads=(1, 1), head_dim=512)
    numbers = torch.randn(512) * 10.0 ** torch.arange(-10, 6).repeat(32)
    ties = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 3 * 2.0**-25, 65519.0, 65520.0, -1e9, -0.0]
    numbers[:8] = torch.tensor(ties)
    numbers[8:10] = torch.tensor([float("nan"), float("inf")])
    case.qkv[0][0, 512:] = numbers.repeat(2)
    want = numbers.clamp(-65504, 65504).half()
    want[9] = float("nan")
    backend, slot = NativeAttention(torch.float16), case.batch([1], [1], [0]).slots
    for isa in library.isas:
        library.use_isa(isa)
        cache = cache_of(case, backend)
        case.feed(backend, cache, [1])
        keys = cache.keys.view(-1, 512, 16).transpose(1, 2).reshape(-1, 512)[slot]
        values = cache.values.view(-1, 512)[slot]
        for found in (keys[0], values[0]):
            assert torch.equal(found.nan_to_num(1.5), want.nan_to_num(1.5)), isa
            assert found.isnan().sum() == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_become_one(
    wrong: float, dtype: torch.dtype, library: Library
) -> None:
    """Red when a broken key has no weight, and the query a plausible answer."""
    backend = NativeAttention(dtype)
    for at, isa in itertools.product((0, 130, 299), library.isas):
        library.use_isa(isa)
        case = make_case([300], heads=(2, 2), head_dim=32)
        key = case.qkv[0][at].view(6, 32)[2]  # of the first kv head
        key[5] = wrong
        case.qkv[0].view(-1, 6, 32)[:, 0, 5] = 1.0  # so that products are +infinity, not NaN
        cache = cache_of(case, backend)
        out = case.step(backend, cache, [300], [300])
        assert out[at:, 0].isnan().all() and out[:at].isfinite().all(), (isa, at)
        assert out[:, 1].isfinite().all(), (isa, at)


def test_a_key_at_minus_infinity_has_no_weight(library: Library) -> None:
    """Red when it makes a number of nothing, or nothing of the other keys."""
    case, backend = make_case([200], heads=(1, 1), head_dim=16), NativeAttention()
    case.qkv[0][:, :16] = 1.0
    without = case.qkv[0].clone()
    case.qkv[0][150, 16] = -float("inf")
    case.qkv[0][150, 32:] = 1e30
    got = case.step(backend, cache_of(case, backend), [200], [200])
    without[150, 16] = -1e9
    want = replace(case, qkv=[without]).expected([200], [200])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------ who has it


CPU = torch.device("cpu")


def test_it_is_the_first_choice_on_a_cpu(library: Library) -> None:
    spec = make_case([1], head_dim=64).spec
    assert select_backend(None, CPU, torch.float32, spec)[0] == "native"
    assert select_backend(None, CPU, torch.bfloat16, spec)[0] == "cpu"
    assert select_backend(None, CPU, torch.float32, replace(spec, head_dim=24))[0] == "cpu"


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a machine without a compiler has no attention, or does not hear why it is slower."""
    monkeypatch.setattr(native, "find_library", lambda: Found(None, "no C compiler was found"))
    spec = make_case([1]).spec
    assert select_backend(None, CPU, torch.float32, spec)[0] == "cpu"
    with pytest.raises(NotSupported, match="native: no C compiler was found"):
        select_backend("native", CPU, torch.float32, spec)
