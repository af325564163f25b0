"""Guesses of heads from captured graphs are those kernel by kernel, and are captured ahead.

Red when a graph reads another guess's places, when bits of a guess depend on what it is padded to,
when a capture changes what the next piece reads, or when a piece cannot be captured at all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.llm import LLM
from quire.runner.late_work import LateWork
from tests.gpu import test_gpu_spec as chains
from tests.spec import heads
from tests.spec.cases import answer
from tests.spec.test_head_graphs import TREE, drafter_of, guesses_of, in_turns, is_usual

CASES = [
    ("eagle3", "llama", None),
    ("medusa", "llama", None),
    ("mtp", "deepseek_v3", None),
    ("eagle3", "llama", TREE),
    ("medusa", "llama", TREE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def opened(folder: Path, method: str, family: str, tree: str | None = None) -> LLM:
    if not (folder / family).exists():
        chains.opened(folder, family)
    if method == "mtp" and not heads.has_mtp(folder / family):
        heads.add_mtp(folder / family)
    config: dict[str, Any] = heads.head_for(method, folder, family)
    if tree is not None:
        del config["num_speculative_tokens"]
        config["speculative_token_tree"] = tree
    return chains.opened(folder, family, speculative_config=config)


@pytest.mark.parametrize(("method", "family", "tree"), CASES)
def test_guesses_are_those_without_graphs(
    method: str, family: str, tree: str | None, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = opened(folder, method, family, tree)
    drafter_of(plain).graphs = None
    want = guesses_of(plain)
    said = [in_turns(plain, chains.asked()) for _ in range(2)]  # then from cached prefixes
    llm = opened(folder, method, family, tree)
    assert drafter_of(llm).graphs is not None
    got = guesses_of(llm)
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert [in_turns(llm, chains.asked()) for _ in range(2)] == said
    assert not [record for record in caplog.records if "head_without_graph" in record.msg]
    assert len(got) > 100 and len(got) == len(want)
    apart = [(mine, theirs) for mine, theirs in zip(got, want, strict=True) if mine != theirs]
    # Bits of guesses are nobody's contract, those of tokens are: see above.
    assert len(apart) <= len(want) // 100, f"{len(apart)} of {len(want)}, the first: {apart[0]}"


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_what_is_captured_ahead_need_not_be_captured_late(method: str, folder: Path) -> None:
    """Red when a size or a form of a guess is forgotten, or captures are not counted as late."""
    usual = [(text, params) for text, params in chains.asked() if is_usual(params)]
    llm = opened(folder, method, "llama")
    late, drafter = LateWork(llm._engine.runner), drafter_of(llm)
    with torch.inference_mode():
        for piece in drafter.ahead():
            piece()
    assert late.num_captured > 20
    captured: list[object] = []
    memory = drafter.graphs._graphs.memory if drafter.graphs is not None else None
    assert memory is not None
    memory.tell = captured.append
    answer(llm, usual)
    own = [key for key in captured if isinstance(key, tuple) and "head" in str(key[0])]
    assert captured and not own, f"{own=}"
