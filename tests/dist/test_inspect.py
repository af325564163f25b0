"""What `quire inspect` says of ranks is what their engine finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.cli.inspect import inspect
from quire.engine.rank_group import RankGroup
from quire.flat_args import args_of
from quire.models.tiny import tiny_model
from tests.dist.group import SMALL, model_on

SHARED_OUT = [
    ("qwen3", {"tensor_parallel_size": 2}),
    ("gemma3_text", {"pipeline_parallel_size": 2}),
    ("deepseek_v3", {"data_parallel_size": 2}),
]


@pytest.mark.parametrize(("family", "how"), SHARED_OUT, ids=[each[0] for each in SHARED_OUT])
def test_pages_of_ranks(family: str, how: dict[str, Any], group: RankGroup, tmp_path: Path) -> None:
    """Red when pages are counted as if one rank kept all of each."""
    folder = tiny_model(family, tmp_path)
    # Fewer than all requests could use together.
    memory: dict[str, Any] = {"kv_cache_memory": 100_000, "max_num_seqs": 16}
    args = args_of(SMALL | memory | how | {"model": str(folder), "device": "cpu"})
    said = {made.what: made for made in inspect(args).decisions}
    with model_on(group, folder, **memory, **how) as llm:
        made = {decision.what: decision for decision in llm.decisions}
    num_pages = made["kv cache"].value.split()[0]
    assert said["kv cache"].value.startswith(f"about {num_pages} pages of {SMALL['page_size']}")
    assert said["cpu kernels"].value == made["cpu kernels"].value


def test_weights_of_ranks(tmp_path: Path) -> None:
    """Red when stages have other layers than their engines load, or heads are counted twice."""
    folder = tiny_model("qwen3", tmp_path, hidden_size=64, intermediate_size=96)

    def weights(**how: Any) -> str:
        args = args_of({"model": str(folder), "device": "cpu", **how})
        return next(m.value for m in inspect(args).decisions if m.what == "weights of a rank")

    hidden, ffn, head, vocab = 64, 96, 16, 258
    layer = hidden * head * (4 + 2 + 2 + 4) + 3 * hidden * ffn + 2 * hidden + 2 * head
    first, last = layer + 2 * vocab * hidden, layer + hidden
    assert weights(pipeline_parallel_size=2) == f"about {kib(last)} to {kib(first)}"
    # Norms are on both; rows of the vocabulary are dealt in sixteens.
    cut, both = 2 * (layer - 2 * hidden - 2 * head), 5 * hidden + 4 * head
    sizes = [cut // 2 + both + 2 * rows * hidden for rows in (vocab - 144, 144)]
    assert weights(tensor_parallel_size=2) == f"about {kib(sizes[0])} to {kib(sizes[1])}"


def kib(count: int) -> str:
    return f"{count * 4 / 1024:.{0 if count * 4 >= 100 * 1024 else 2}f} KiB"
