"""Who gets what: every output has exactly one rank, and every head of queries its keys."""

from __future__ import annotations

from typing import Any

import pytest

from quire.dist.cuts import Cut, head_cuts, row_cuts, width_cuts
from quire.errors import NotSupported
from quire.flat_args import args_of
from quire.models.registry import spec_of
from quire.models.tiny_configs import tiny_config
from quire.resolve import resolve


@pytest.mark.parametrize("num_ranks", range(1, 7))
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 1), (12, 12), (32, 8), (6, 2)])
def test_heads_are_shared_out_with_their_keys(heads: int, kv_heads: int, num_ranks: int) -> None:
    """Red when a head of queries is lost, doubled, or meets the keys of another."""
    each = heads // kv_heads
    cuts = head_cuts(heads, kv_heads, num_ranks)
    assert [q for cut in cuts for q in range(cut.q.begin, cut.q.end)] == list(range(heads))
    for q, kv in cuts:
        assert q.size > 0
        own_each = q.size // kv.size  # how a rank's attention finds the keys of a query
        assert q.size % kv.size == 0
        for head in range(q.size):
            assert kv.begin + head // own_each == (q.begin + head) // each
    assert cuts[0].kv.size == max(cut.kv.size for cut in cuts)  # the first rank sizes the cache


@pytest.mark.parametrize("num_ranks", range(1, 6))
def test_outputs_are_shared_out(num_ranks: int) -> None:
    """Red when a row of the vocabulary belongs to nobody, or a width is cut inside a vector."""
    for total in (16, 258, 320, 4096):
        cuts = row_cuts(total, num_ranks)
        if not cuts[0].is_whole:
            assert [c.begin for c in cuts[1:]] == [c.end for c in cuts[:-1]]
            assert (cuts[0].begin, cuts[-1].end) == (0, total)
        assert all(cut.size > 0 for cut in cuts)
        widths = width_cuts(total, num_ranks)
        assert all(cut.is_whole or cut.size % 16 == 0 for cut in widths)
    assert width_cuts(40, 2) == (Cut.whole(40),) * 2


def test_more_ranks_than_heads_are_refused() -> None:
    """Red when ranks without a head are started."""
    with pytest.raises(NotSupported, match="tensor_parallel_size=4"):
        head_cuts(4, 2, 5)


OWN: dict[str, Any] = {"tensor_parallel_size": 1, "data_parallel_size": 2}
DRAFTS = {"method": "draft_model", "model": "default"}


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"kv_role": "prefill"}, "one rank"),
        ({"tensor_parallel_size": 0}, "from 1 to"),
        ({"pipeline_parallel_size": 33}, "64 or less"),
        ({"tp_reduce": "tree"}, "'exact' or 'fast'"),
        ({"num_redundant_experts": 1, "load_format": "dummy"}, "leave one of them out"),
        ({"data_parallel_size": 2}, "data_parallel_size or tensor_parallel_size, not both"),
        (OWN | {"pipeline_parallel_size": 2}, "data_parallel_size or pipeline_parallel_size"),
        (OWN | {"speculative_config": DRAFTS}, "'suffix' or 'ngram', or tensor_parallel_size"),
        (OWN | {"kv_disk": "pages"}, "leave them out, or use tensor_parallel_size"),
        (OWN | {"data_parallel_size": 65}, "from 1 to 64"),
    ],
)
def test_what_ranks_cannot_do_is_said(changes: dict[str, Any], way_out: str) -> None:
    """Red when ranks start with something that only one of them would take part in."""
    args = args_of({"device": "cpu", "tensor_parallel_size": 2, **changes})
    with pytest.raises(NotSupported, match=way_out):
        resolve(args, spec_of(tiny_config("llama")))


def test_more_ranks_than_experts_are_refused() -> None:
    """Red when ranks start of which some would have no expert."""
    args = args_of({"device": "cpu", "data_parallel_size": 5})
    with pytest.raises(NotSupported, match=r"data_parallel_size=5 for 4 experts.*use fewer"):
        resolve(args, spec_of(tiny_config("mixtral")))
    resolve(args, spec_of(tiny_config("llama")))
