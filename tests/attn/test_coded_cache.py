"""Caches of codes: every backend that keeps them gives attention over what the codes stand for.

The codes themselves are judged by trying all of them (`tests/coded_case.py`). That bits follow
neither company nor chunks is part of the contract, as it is for floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.attn.backend import AttentionBackend, AttnSpec, LayerCache
from quire.attn.cache_codes import RowCodes, turned
from quire.attn.cpu import CpuAttention
from quire.attn.native import NativeAttention
from quire.attn.reference import ReferenceAttention
from quire.attn.select import select_backend
from quire.errors import NotSupported
from quire.kv.forms import CODED, parse_cache_dtype
from quire.kv.spec import KvScales
from quire.native.library import find_library
from tests.attn.test_contract import close
from tests.coded_case import FORMS, coded_cache, decoded, near
from tests.paged_case import make_case

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "cpu": CpuAttention,
    "native": NativeAttention,
    "native beside fp16": lambda: NativeAttention(torch.float16),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of 96": {"head_dim": 96},
    "window": {"window": 21},
    "cap and sinks": {"softcap": 2.0, "has_sinks": True},
    "all": {"window": 25, "softcap": 1.5, "has_sinks": True},
    "pages of 4": {"page_size": 4},
}
QUERIES, CONTEXTS = [11, 9, 1, 3], [45, 9, 65, 20]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return BACKENDS[request.param]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_attends_to_what_the_codes_say(backend: AttentionBackend, form: str, kind: str) -> None:
    """Red when a code, its scale or its rotation is not what is written down."""
    case = make_case(CONTEXTS, heads=(4, 2), **KINDS[kind])
    cache = coded_cache(case, form)
    case.feed(backend, cache, [n - q for q, n in zip(QUERIES, CONTEXTS, strict=True)])
    got = case.step(backend, cache, QUERIES, CONTEXTS)
    close(got, decoded(case, form).expected(QUERIES, CONTEXTS))


@pytest.mark.parametrize("form", FORMS)
def test_company_and_chunks_change_no_bit(backend: AttentionBackend, form: str) -> None:
    lens = [170, 40, 33]
    case = make_case(lens, heads=(6, 2))
    cache = coded_cache(case, form)
    whole = case.step(backend, cache, lens, lens)
    stored = [part.clone() for part in cache[:2]]
    together = case.step(backend, cache, [1, 1, 1], lens)
    for i, n in enumerate(lens):
        assert torch.equal(case.step(backend, cache, [1], [n], seqs=[i])[0], together[i])
    if isinstance(backend, ReferenceAttention):
        return  # its products are as long as the step's
    for a, b in itertools.pairwise([0, 7, 130, 170]):
        assert torch.equal(case.step(backend, cache, [b - a], [b]), whole[a:b]), (a, b)
    for part, before in zip(cache[:2], stored, strict=True):
        assert torch.equal(part, before), "what is stored follows the step"


@pytest.mark.parametrize("form", FORMS)
def test_writes_only_its_own_slots(backend: AttentionBackend, form: str) -> None:
    case = make_case([20, 20])
    cache = coded_cache(case, form)
    for part in cache[:2]:
        part.fill_(0xA5)
    case.step(backend, cache, [20], [20], seqs=[0])
    own = case.page_table[case.rows[0], :2].long()
    others = torch.ones(case.num_pages, dtype=torch.bool)
    others[own] = False
    for part in cache[:2]:
        assert (part[others] == 0xA5).all()
        row_bytes = CODED[form].row_bytes(32)
        assert (part[own] == 0xA5).sum() >= 12 * 2 * row_bytes  # the last page's unused slots


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_a_checkpoints_scales(backend: AttentionBackend, form: str) -> None:
    """Red when a calibrated scale is not the one used, or what lies beyond it is not cut off."""
    fixed = KvScales(1.7 / 448, 0.9 / 448) if form == "fp8" else KvScales(1.7 / 127, 0.9 / 127)
    case = make_case(CONTEXTS, heads=(4, 2))
    cache = coded_cache(case, form, fixed)
    case.feed(backend, cache, [n - q for q, n in zip(QUERIES, CONTEXTS, strict=True)])
    got = case.step(backend, cache, QUERIES, CONTEXTS)
    close(got, decoded(case, form, fixed).expected(QUERIES, CONTEXTS))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["key", "value"])
def test_what_is_no_number_does_not_become_one(
    backend: AttentionBackend, form: str, wrong: float, part: str
) -> None:
    case = make_case([40], heads=(2, 2))
    case.qkv[0][17].view(6, 32)[2 if part == "key" else 4, 5] = wrong
    out = case.step(backend, coded_cache(case, form), [40], [40])
    assert out[17:, 0].isnan().all() and out[:, 1].isfinite().all()
    if part == "key" or isinstance(backend, NativeAttention):  # torch: no weight times NaN is NaN
        assert out[:17].isfinite().all()


# ------------------------------------------------------------ rows


def codes_of(form: str, dim: int) -> RowCodes:
    spec = AttnSpec(1, 1, dim, 1.0, 16)
    empty = torch.zeros(0, dtype=torch.uint8)
    found = RowCodes.of(LayerCache(empty, empty, CODED[form]), spec)
    assert found is not None
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fixed", [None, 0.011])
def test_every_code_is_the_nearest(form: str, fixed: float | None) -> None:
    """Red when a scale is rounded down, or a number goes to a code that is not the nearest."""
    torch.manual_seed(0)
    least, most = (-20, 20) if fixed is None else (-4, 4)
    x = torch.randn(200, 32) * 10.0 ** torch.linspace(least, most, 200)[:, None]
    if fixed is None:
        x[3] = 0.0
        x[4] *= 1e-22  # denormal
    codes = codes_of(form, 32)
    got = codes.decode(codes.encode(x, fixed)).double()
    torch.testing.assert_close(got, near(x, form, fixed), rtol=1e-6, atol=0)


def test_ties_go_to_the_even_code() -> None:
    for form, wanted in (("int8", [127.0, 0, 2, 2, -2]), ("fp8", [448.0, 0, 0, 2**-8, -1.0])):
        ties = [127.0, 0.5, 1.5, 2.5, -2.5]
        if form == "fp8":  # halfway between its smallest numbers, and between 1 and 1.125
            ties = [448.0, 2**-10, -(2**-10), 3 * 2**-10, -1.0625]
        codes, x = codes_of(form, 5), torch.tensor([ties])
        got = codes.decode(codes.encode(x, 1.0))
        assert got[0].tolist() == wanted, form


def test_rows_of_eight_bit_floats_lie_nearer_than_by_their_largest_number() -> None:
    """Red when no scale is searched, or by what is not the error."""
    torch.manual_seed(0)
    x, codes = torch.randn(500, 64), codes_of("fp8", 64)
    least = x.abs().amax(1, keepdim=True) / 448
    by_largest = (x / least).to(torch.float8_e4m3fn).float() * least
    searched = codes.decode(codes.encode(x, None))
    errors = [(near - x).square().sum() for near in (searched, by_largest)]
    assert errors[0] < 0.75 * errors[1]


@pytest.mark.parametrize("dim", [64, 96, 48, 80, 6])
def test_rotations_undo_themselves(dim: int) -> None:
    """Red when what queries are multiplied by is not what keys are."""
    codes, x = codes_of("int4", dim), torch.randn(5, 3, dim)
    assert codes.block == dim & -dim
    once = turned(x, codes.block)
    torch.testing.assert_close(codes.turned_back(once), x)
    y = torch.randn(5, 3, dim)
    dots = (codes.turned_queries(y) * once).sum(-1)
    torch.testing.assert_close(dots, (x * y).sum(-1), rtol=1e-4, atol=1e-4)


def test_a_rotation_saves_keys_with_few_large_dimensions() -> None:
    """Red when int4 keys are not rotated: such keys lose all their small numbers."""
    torch.manual_seed(0)
    keys = torch.randn(100, 64)
    keys[:, 3] *= 40
    codes = codes_of("int4", 64)
    plain = codes.decode(codes.encode(keys, None))
    rotated = codes.turned_back(codes.decode(codes.encode(turned(keys, 64), None)))
    others = [i for i in range(64) if i != 3]
    lost = [(kept - keys)[:, others].square().mean() for kept in (plain, rotated)]
    assert lost[1] < 0.7 * lost[0]


# ------------------------------------------------------------ who keeps what


def test_who_keeps_codes() -> None:
    cpu, f32 = torch.device("cpu"), torch.float32
    wide = "cpu" if find_library()[0] is None else "native"
    for dim, want in ((64, wide), (48, "cpu"), (24, "cpu")):
        spec = AttnSpec(2, 2, dim, 1.0, 16)
        assert select_backend(None, cpu, f32, spec, "int4")[0] == want
    with pytest.raises(NotSupported, match="kv_cache_dtype='int8'; tried triton: not for cpu"):
        select_backend("triton", cpu, f32, AttnSpec(2, 2, 64, 1.0, 16), "int8")


def test_words() -> None:
    assert [parse_cache_dtype(w) for w in ("auto", "fp8_e4m3", "int4_per_token_head")] == [
        "auto",
        "fp8",
        "int4",
    ]
    for word, why in (("fp8_e5m2", "two bits of fraction"), ("q8", "want 'auto'"), (8, "want")):
        with pytest.raises(NotSupported, match=f"kv_cache_dtype={word!r}.*{why}"):
            parse_cache_dtype(word)
