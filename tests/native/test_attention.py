"""Native attention against fp64, with windows, caps and sinks, over shuffled pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.forward import Batch
from quire.native.attention import TapeAttention
from quire.native.library import Library
from quire.native.tape import Tape
from quire.runner.tapes import Pointers
from tests.paged_case import PLAIN, PagedCase, make_case

KINDS = {
    "plain": {"heads": (4, 2), "head_dim": 32},
    "many queries a kv head": {"heads": (9, 1), "head_dim": 64},
    "more heads than scores are held of": {"heads": (40, 1), "head_dim": 16},
    "narrow": {"heads": (2, 2), "head_dim": 16},
    "window": {"heads": (4, 2), "head_dim": 32, "window": 21},
    "window of one": {"heads": (4, 2), "head_dim": 32, "window": 1},
    "cap": {"heads": (4, 2), "head_dim": 32, "softcap": 5.0},
    "sinks": {"heads": (4, 2), "head_dim": 32, "has_sinks": True},
    "pages of 4": {"heads": (4, 2), "head_dim": 32, "page_size": 4},
}


def attend(case: PagedCase, cache: object, batch: Batch, qkv: Tensor, library: Library) -> Tensor:
    """One layer's attention, recorded and replayed."""
    tape = Tape(library, len(qkv))
    width = qkv.shape[1]
    given = tape.rows(width, False)
    given.memory.view(-1, width)[: len(qkv)] = qkv
    attention = TapeAttention(tape)
    q = attention.prepare(given, PLAIN, cache, 0, case.spec)  # type: ignore[arg-type]
    out = attention.run(q, cache, 0, case.spec, case.sinks)  # type: ignore[arg-type]
    tape.end()
    index = torch.zeros(0, dtype=torch.int64)
    sent = {"sample_index": index, "sample_rows": index.int()}
    tape.replay(Pointers(1).step((batch,), sent))
    return out.memory.view(-1, out.width)[: len(qkv)].clone()


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, library: Library) -> None:
    """Red when a key is missed, seen too early, or weighed differently in other company."""
    lens = [70, 33, 1, 18]
    case = make_case(lens, **KINDS[kind])  # type: ignore[arg-type]
    from quire.attn.cpu import CpuAttention

    cache = case.cache(CpuAttention())
    seqs = range(len(lens))
    whole = attend(case, cache, case.batch(lens, lens, seqs), torch.cat(case.qkv), library)
    want = case.expected(lens, lens).reshape(whole.shape)
    assert torch.allclose(whole.double(), want.double(), rtol=1e-5, atol=1e-5)
    # The last tokens one by one, on every instruction set: bits of the whole prompt's.
    starts = torch.tensor([0, *lens]).cumsum(0)
    for isa in library.isas:
        library.use_isa(isa)
        for end in (70, 41, 20):
            fed = case.qkv[0][end - 1 : end]
            alone = attend(case, cache, case.batch([1], [end], [0]), fed, library)
            assert torch.equal(alone[0], whole[starts[0] + end - 1]), (isa, end)
