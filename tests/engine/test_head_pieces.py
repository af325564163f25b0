"""Pieces of a head's guess over the Triton attention that GPUs have, in the interpreter.

Red when a plan with bounds for lengths, the places of a tree or the padding of a piece gives
another guess than the plan of the step at hand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.interpreter  # noqa: F401  mends the interpreter for this NumPy
from quire.attn.latent_triton import LatentTriton
from quire.attn.triton import TritonAttention
from quire.engine import draft_heads
from quire.kernels.paged_tile import Launch, PagedConfig
from tests.spec.cases import TEXTS, answer, sampling
from tests.spec.test_head_graphs import TREE, Played, give_graphs, guesses_of, opened

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
TILES = PagedConfig(16, 16, Launch(16, 4, 2), Launch(16, 4, 2))


def _triton(name: None, device: torch.device, dtype: torch.dtype, spec: Any) -> tuple[str, Any]:
    kind = TritonAttention if spec.value_dim is None else LatentTriton
    return "triton", kind(torch.float32, TILES)


CASES = [("eagle3", None), ("mtp", TREE), ("eagle3", TREE)]


@pytest.mark.parametrize(("method", "tree"), CASES[: 2 + IS_LONG])
def test_guesses_of_a_layer(
    method: str, tree: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(draft_heads, "select_backend", _triton)
    config = {} if tree is None else {"speculative_token_tree": tree}
    asked = [(TEXTS[0][:18], sampling("greedy", 1, max_tokens=4, ignore_eos=True))]
    asked += [(TEXTS[2], sampling("top-p", 2, max_tokens=3, ignore_eos=True))]
    found = []
    for memory in (None, Played()):
        llm = opened(tmp_path, method, **config)
        drafter: Any = llm._engine.runner.drafter
        drafter._tape = None
        if memory is not None:
            give_graphs(llm, memory)
        guesses = guesses_of(llm)
        found.append((answer(llm, asked), guesses))
    assert found[0] == found[1] and len(found[0][1]) > 2
