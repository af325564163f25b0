"""Native caches of codes: the codes are those of plain torch, byte for byte, and a query's bits
follow neither the instruction set nor threads, chunks, pages or the tape."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from quire.attn.backend import LayerCache
from quire.attn.native import NativeAttention
from quire.attn.reference import ReferenceAttention
from quire.native.heads import StepPointers
from quire.native.library import Library
from quire.native.tape import Rows, Tape
from tests.coded_case import FORMS, coded_cache, decoded
from tests.paged_case import PLAIN, PagedCase, make_case

KINDS: dict[str, dict[str, Any]] = {
    "three queries a kv head": {"heads": (9, 3), "head_dim": 64},
    "wide and odd": {"heads": (2, 1), "head_dim": 224},
    "all": {"heads": (4, 1), "head_dim": 96, "window": 200, "softcap": 3.0, "has_sinks": True},
    "pages of 4": {"heads": (4, 2), "head_dim": 32, "page_size": 4},
    "pages of 64": {"heads": (4, 2), "head_dim": 32, "page_size": 64},
}
LENS = [300, 33, 1, 130]  # spans are 128 keys


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, form: str, library: Library) -> None:
    """Red when a scale meets another token's code, or an instruction set decodes otherwise."""
    case, backend = make_case(LENS, **KINDS[kind]), NativeAttention()
    cache = coded_cache(case, form)
    whole = case.step(backend, cache, LENS, LENS)
    want = decoded(case, form).expected(LENS, LENS)
    torch.testing.assert_close(whole.double(), want, rtol=1e-4, atol=2e-5)
    for isa, threads in itertools.product(library.isas, (1, 2)):
        library.use_isa(isa)
        library.set_threads(threads)
        own = coded_cache(case, form)
        assert torch.equal(case.step(backend, own, LENS, LENS), whole), (isa, threads)
        for end in (1, 41, 128, 129, 300):
            alone = case.step(backend, own, [1], [end])
            assert torch.equal(alone[0], whole[end - 1]), (isa, threads, end)
        some = case.step(backend, own, [59, 1, 1], [300, 33, 1])
        assert torch.equal(some[:60], torch.cat((whole[241:300], whole[332:333]))), (isa, threads)
        for part, before in zip(own[:2], cache[:2], strict=True):
            assert torch.equal(part, before), (isa, threads)


@pytest.mark.parametrize("chunk", [3, 129])
@pytest.mark.parametrize("form", FORMS)
def test_chunks_change_no_bit(form: str, chunk: int, library: Library) -> None:
    library.set_threads(2)
    case, backend = make_case([500], **KINDS["all"]), NativeAttention()
    cache = coded_cache(case, form)
    whole = case.step(backend, cache, [500], [500])
    cuts = [*range(371, 500, chunk), 500]
    parts = [case.step(backend, cache, [b - a], [b]) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole[371:])


def rows_of(case: PagedCase, cache: LayerCache, form: str) -> list[Tensor]:
    """A native cache's [slots, heads, row bytes] as plain torch lays them: codes, then a scale."""
    size, heads, dim = case.spec.page_size, case.spec.num_kv_heads, case.spec.head_dim
    run, found = min(size, 16), []
    width = dim // 2 if form == "int4" else dim
    for at, part in enumerate(cache[:2]):
        runs = part.view(case.num_pages, heads, size // run, run * (width + 2))
        codes, scales = runs[..., : run * width], runs[..., run * width :].unflatten(-1, (run, 2))
        if at == 0:
            codes = codes.unflatten(-1, (width, run)).transpose(-1, -2)
        else:
            codes = codes.unflatten(-1, (run, width))
            if form == "int4":  # of 32 dimensions, 16 low halves and 16 high ones
                bytes_ = codes.unflatten(-1, (-1, 16))
                plain = torch.stack((bytes_ & 15, bytes_ >> 4), -2).flatten(-3)
                codes = plain[..., ::2] | plain[..., 1::2] << 4
        rows = torch.cat((codes, scales), -1).flatten(2, 3)  # [pages, heads, size, row]
        found.append(rows.transpose(1, 2).flatten(0, 1))
    return found


@pytest.mark.parametrize("page_size", [4, 16, 32])
@pytest.mark.parametrize("form", FORMS)
def test_codes_are_those_of_plain_torch(form: str, page_size: int, library: Library) -> None:
    """Red when the layout is not what quire_native.h says, or rounding is not what torch does."""
    case = make_case([60], heads=(2, 2), head_dim=64, page_size=page_size)
    x = case.qkv[0].view(60, 6, 64)
    x *= 10.0 ** torch.linspace(-30, 20, 60)[:, None, None]
    x[7, 3] = 0.0
    x[8, 4, 5] = float("nan")
    x[9, 2, 60] = -float("inf")
    plain = coded_cache(case, form)
    case.feed(ReferenceAttention(), plain, [60])
    slots = case.batch([60], [60], [0]).slots
    for isa in library.isas:
        library.use_isa(isa)
        cache = coded_cache(case, form)
        case.feed(NativeAttention(), cache, [60])
        for got, part in zip(rows_of(case, cache, form), plain[:2], strict=True):
            want = part.view(case.num_pages * page_size, 2, -1)
            assert torch.equal(got[slots], want[slots]), isa


def test_a_tape_replays_the_same(library: Library) -> None:
    """Red when the form of the cache is not recorded, or recorded of one half alone."""
    for form in FORMS:
        case, backend = make_case(LENS, **KINDS["all"]), NativeAttention()
        batch, qkv = case.batch(LENS, LENS, range(len(LENS))), torch.cat(case.qkv)
        want = case.step(backend, coded_cache(case, form), LENS, LENS)
        tape, cache = Tape(library, len(qkv)), coded_cache(case, form)
        given = tape.rows(qkv.shape[1], False)
        given.memory.view(qkv.shape).copy_(qkv)
        q = backend.prepare(cast("Tensor", given), PLAIN, cache, 0, case.spec)
        out = cast("object", backend.run(q, cache, 0, case.spec, case.sinks))
        assert isinstance(out, Rows)
        tape.end()
        tape.replay(StepPointers(1).step((batch,)))
        assert torch.equal(out.memory.view(want.shape), want)


def test_pages_may_lie_apart(library: Library) -> None:
    """Red when a layer at a place that holds wider pages of others takes them for its own."""
    case, backend = make_case([70], heads=(4, 2)), NativeAttention()
    for form in FORMS:
        dense = coded_cache(case, form)
        wide = [torch.full((len(part), 3 * part.shape[1]), 0xA5).byte() for part in dense[:2]]
        apart = [w[:, : d.shape[1]] for w, d in zip(wide, dense[:2], strict=True)]
        for part in apart:
            part.zero_()
        got = case.step(backend, dense._replace(keys=apart[0], values=apart[1]), [70], [70])
        assert torch.equal(got, case.step(backend, dense, [70], [70]))
        assert all((w[:, d.shape[1] :] == 0xA5).all() for w, d in zip(wide, dense[:2], strict=True))
