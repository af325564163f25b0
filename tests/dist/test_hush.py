"""A rank measures its largest step by itself: nobody is asked, on whichever stage it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attn.select import select_backend
from quire.dist.hush import Hush, HushedComm, HushedLink
from quire.dist.ranks import Ranks
from quire.dist.stages import Stage
from quire.engine.cache_form import plain_form
from quire.models.decoder import Decoder, heads_of, spec_of_rank
from quire.models.kv_cache import cache_of
from quire.models.registry import spec_of
from quire.models.tiny_configs import tiny_config
from quire.ops.torch_ops import TorchOps
from quire.runner.rows import RequestRows
from quire.runner.warmup import largest_step


class Nobody:
    """A way to ranks that are not ready."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        raise AssertionError("somebody was asked")

    gather_rows = gather

    def merge(self, x: Tensor) -> Tensor:
        raise AssertionError("somebody was asked")

    def tell(self, x: Tensor) -> None:
        raise AssertionError("somebody was told")

    send = receive = check = tell


def ranks_at(rank: int, stage: int, num_stages: int, has_homes: bool) -> Ranks:
    hush = Hush()
    staged = Stage(stage, num_stages, HushedLink(Nobody(), hush))  # type: ignore[arg-type]
    comm = HushedComm(Nobody(), hush)  # type: ignore[arg-type]
    return Ranks(rank, 2, comm, staged if num_stages > 1 else Stage(), False, has_homes, hush)


CASES = [
    pytest.param("llama", 1, 0, 1, False, id="beside the first"),
    pytest.param("qwen2_moe", 0, 0, 2, False, id="experts of the first stage"),
    pytest.param("qwen2_moe", 1, 1, 2, False, id="experts of the last stage"),
    pytest.param("deepseek_v3", 1, 0, 1, True, id="no rows of its own"),
]


@pytest.mark.parametrize(("family", "rank", "stage", "num_stages", "has_homes"), CASES)
def test_nobody_is_asked(
    family: str, rank: int, stage: int, num_stages: int, has_homes: bool, tmp_path: Path
) -> None:
    """Red when a rank that sizes its cache waits for others, which do not know of it."""
    ranks, device = ranks_at(rank, stage, num_stages, has_homes), torch.device("cpu")
    config: dict[str, Any] = tiny_config(family)
    spec = spec_of(config)
    heads = heads_of(spec_of_rank(spec, ranks), 4)
    _, backend = select_backend(None, device, torch.float32, heads)
    model = Decoder(spec, heads, 64, torch.float32, device, ranks)
    for parameter in model.parameters().values():
        parameter.tensor.zero_()
    model.finish(TorchOps())
    whole = cache_of(
        spec_of_rank(spec, ranks), plain_form(torch.float32), page_size=4, is_staged=num_stages > 1
    )
    cache = whole.of_layers(model.layers)
    rows = RequestRows(3, 64, 16, device, len(cache.groups))
    with pytest.raises(AssertionError, match="somebody was"):
        largest_step(model, backend, cache, rows, 16)
    with ranks.hush.kept():
        assert largest_step(model, backend, cache, rows, 16) > 0
