"""Caches of codes in the Triton kernels, run by the interpreter.

Red when a code, a scale or a rotation is not what `attn/cache_codes.py` says, when a page's layout
differs between writer and reader, or when company or chunks change a bit.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.attn.backend import AttnSpec, HeadTransform, LayerCache
from quire.attn.balance import Balance
from quire.attn.cache_codes import RowCodes
from quire.attn.coded_pages import CodedPages
from quire.attn.proof import prove_codes
from quire.attn.reference import ReferenceAttention
from quire.attn.triton import TritonAttention
from quire.errors import NotSupported
from quire.kv.forms import CODED
from quire.kv.spec import KvScales
from tests.attn.test_coded_cache import KINDS, QUERIES
from tests.attn.test_contract import SMALL_TILES, close
from tests.coded_case import coded_cache, decoded
from tests.paged_case import make_case

CONTEXTS = [19, 9, 40, 12]


def backend_of() -> TritonAttention:
    return TritonAttention(torch.float32, SMALL_TILES)


@pytest.mark.parametrize(
    "form, kind",
    [("int8", "all"), ("fp8", "plain"), ("int4", "heads of 96"), ("int4", "cap and sinks")],
)
def test_attends_to_what_the_codes_say(form: str, kind: str) -> None:
    case = make_case(CONTEXTS, heads=(4, 2), **KINDS[kind])
    backend, cache = backend_of(), coded_cache(case, form)
    case.feed(backend, cache, [n - q for q, n in zip(QUERIES, CONTEXTS, strict=True)])
    got = case.step(backend, cache, QUERIES, CONTEXTS)
    close(got, decoded(case, form).expected(QUERIES, CONTEXTS))


def test_a_checkpoints_scales() -> None:
    fixed = KvScales(1.7 / 448, 0.9 / 448)
    case = make_case([20], heads=(4, 2))
    cache = coded_cache(case, "fp8", fixed)
    got = case.step(backend_of(), cache, [20], [20])
    close(got, decoded(case, "fp8", fixed).expected([20], [20]))


def test_company_and_chunks_change_no_bit() -> None:
    lens = [70, 40]
    case = make_case(lens, heads=(4, 2))
    backend, cache = backend_of(), coded_cache(case, "int8")
    whole = case.step(backend, cache, lens, lens)
    stored = [part.clone() for part in cache[:2]]
    together = case.step(backend, cache, [1, 1], lens)
    for i, n in enumerate(lens):
        assert torch.equal(case.step(backend, cache, [1], [n], seqs=[i])[0], together[i])
    for a, b in itertools.pairwise([0, 7, 70]):
        assert torch.equal(case.step(backend, cache, [b - a], [b]), whole[a:b]), (a, b)
    for part, before in zip(cache[:2], stored, strict=True):
        assert torch.equal(part, before), "what is stored follows the step"


@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dim, rot_dim", [(32, 32), (48, 16)])
def test_the_bytes_are_those_of_plain_torch(form: str, dim: int, rot_dim: int) -> None:
    """Norms, rotation, balance and codes in one kernel; one row is zeros and one holds a NaN."""
    torch.manual_seed(0)
    spec = AttnSpec(4, 2, dim, dim**-0.5, 16)
    angles = torch.outer(torch.arange(40.0), 50.0 ** -torch.linspace(0, 1, rot_dim // 2))
    balance = Balance(torch.randn(2, dim), torch.exp2(torch.randint(-3, 4, (2, dim)).float()))
    heads = HeadTransform(
        angles.cos(), angles.sin(), torch.randn(dim), torch.randn(dim), 1e-6, balance
    )
    case = make_case([21], heads=(4, 2), head_dim=dim)
    case.qkv[0][3, -2 * dim : -dim] = 0.0  # a value of zeros
    case.qkv[0][5, -1] = float("nan")
    cache = coded_cache(case, form)
    batch = case.batch([21], [21], [0])
    backend = backend_of()
    q = backend.prepare(case.qkv[0], heads, cache, backend.plan(batch, spec), spec)

    codes = RowCodes.of(cache, spec)
    assert codes is not None
    plain = LayerCache(torch.zeros_like(cache.keys), torch.zeros_like(cache.values), cache.form)
    reference = ReferenceAttention()
    wanted = reference.prepare(case.qkv[0], heads, plain, reference.plan(batch, spec), spec)
    torch.testing.assert_close(q, wanted, rtol=1e-5, atol=1e-5)
    pages = CodedPages.of(cache, spec)
    assert pages is not None
    for ours, theirs in zip(cache[:2], plain[:2], strict=True):
        mine = pages.read(ours).transpose(1, 2)  # [pages, page size, heads, dim]
        torch.testing.assert_close(mine, codes.read(theirs), rtol=2e-2, atol=1e-3, equal_nan=True)
        differ = (mine != codes.read(theirs)) & ~mine.isnan()
        assert differ.float().mean() < 0.01, "a rounding in a hundred, where the norm's last bit is"


def test_a_device_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when wrong kernels are trusted, or right ones refused."""
    spec, cpu = AttnSpec(2, 1, 16, 0.25, 16), torch.device("cpu")
    prove_codes(backend_of(), CODED["int8"], spec, cpu)
    run = TritonAttention.run
    monkeypatch.setattr(TritonAttention, "run", lambda *args: run(*args) * 1.01)
    with pytest.raises(NotSupported, match=r"'fp8' differs by .* from the reference on this cpu"):
        prove_codes(backend_of(), CODED["fp8"], spec, cpu)
