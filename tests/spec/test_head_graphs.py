"""Guesses of heads from graphs are those without graphs, played on a CPU.

A played graph keeps the piece that it was captured with and runs it again, so whatever a piece
takes from the host is what it was then. Red when padding or a chain that has ended reaches a guess,
when a piece reads what another one left, when a draw is not the one that a request asked for, or
when traffic asks for a graph that was not captured ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attn import select
from quire.engine import draft_heads
from quire.llm import LLM
from quire.params import SamplingParams
from quire.runner import feature_graphs
from quire.runner.feature_drafter import FeatureDrafter
from quire.runner.feature_graphs import FeatureGraphs
from quire.runner.gather import decode_batches
from quire.runner.graphs import GraphCache, GraphMemory
from quire.runner.head_graphs import Lasting
from quire.runner.medusa_drafter import MedusaDrafter
from quire.runner.medusa_graphs import MedusaGraphs
from quire.runner.rows import RequestRows
from quire.step import Work
from tests.spec import heads
from tests.spec.cases import answer, everyone, open_tiny

FAMILIES = {"eagle3": "llama", "mtp": "deepseek_v3", "medusa": "llama"}
TREE = "[(0,), (1,), (0, 0), (1, 0), (2,), (0, 0, 0)]"
Asked = list[tuple[str, SamplingParams]]
Guesses = list[tuple[int, int, list[int]]]  # (row, start, drafts) of each work, as they come


class Played(GraphMemory):
    """Captures on a CPU."""

    kept: Lasting  # that a capture leaves alone: nothing runs

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.num_replays, self.tell = 0, None

    def capture(self, first: Callable[[], object], step: Callable[[], Any], key: object) -> Any:
        assert key not in self.keys, f"captured twice: {key}"
        self.keys.append(key)
        first()
        results: list[Any] = []
        self.kept.run_and_restore(lambda: results.append(step()))
        (made,) = results

        def replay() -> None:
            self.num_replays += 1
            again = step()
            if made is not None:
                made.copy_(again)

        return SimpleNamespace(replay=replay), made


class Failing(Played):
    def capture(self, first: Callable[[], object], step: Callable[[], Any], key: object) -> Any:
        self.keys.append(key)
        raise RuntimeError("no such capture")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    # A backend that takes each draft of a tree as a sequence of its own, as GPUs do.
    monkeypatch.setattr(draft_heads, "select_backend", partial(_reference, select.select_backend))

    monkeypatch.setattr(feature_graphs, "decode_batches", _with_lens)


def _with_lens(
    rows: RequestRows, at: Tensor, positions: Tensor, size: int, *more: Any, **nodes: Any
) -> Any:
    """On a CPU plans go by the host's lengths, which a graph has bounds of alone."""
    return decode_batches(rows, at, positions, size, positions.numpy() + 1, **nodes)


def _reference(select_backend: Callable[..., Any], name: None, *more: Any) -> Any:
    return select_backend("reference", *more)


def opened(folder: Path, method: str, **config: Any) -> LLM:
    family = FAMILIES[method]
    if not (folder / family).exists():
        open_tiny(folder, family)
        if method == "mtp":
            heads.add_mtp(folder / family)
    asked = heads.head_for(method, folder, family) | config
    if "speculative_token_tree" in config:
        del asked["num_speculative_tokens"]
    return open_tiny(folder, family, speculative_config=asked)


def drafter_of(llm: LLM) -> FeatureDrafter | MedusaDrafter:
    drafter = llm._engine.runner.drafter
    assert isinstance(drafter, (FeatureDrafter, MedusaDrafter))
    return drafter


def give_graphs(llm: LLM, memory: Played) -> None:
    runner, drafter = llm._engine.runner, drafter_of(llm)
    nothing: Any = None
    rows = runner.rows
    decodes = GraphCache(nothing, rows.max_rows, rows.max_len, spare_row=rows.max_rows)
    decodes.memory = memory
    if isinstance(drafter, MedusaDrafter):
        drafter.graphs = MedusaGraphs(decodes, drafter.heads, drafter._draws)
    else:
        drafter.graphs = FeatureGraphs(decodes, drafter.layer, drafter._rows, drafter._draws)
    memory.kept = drafter.graphs._kept


def guesses_of(llm: LLM) -> Guesses:
    """All that are made from now on."""
    drafter, rows, seen = drafter_of(llm), llm._engine.runner.rows, []
    fill = drafter.fill

    def watched(works: Sequence[Work]) -> None:
        fill(works)
        for work in works:
            places = slice(work.start + 1, work.start + 1 + work.num_drafts)
            seen.append((work.row, work.start, rows.tokens[work.row, places].tolist()))

    drafter.fill = watched  # type: ignore[method-assign]
    return seen


def in_turns(llm: LLM, asked: Asked) -> list[object]:
    """Grammars are compiled beside the engine, so whoever has one is alone: all is in order."""
    together = [(t, p) for t, p in asked if p.structured_outputs is None]
    alone = [(t, p) for t, p in asked if p.structured_outputs is not None]
    return [answer(llm, some) for some in (together, *([one] for one in alone))]


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("method", FAMILIES)
def test_guesses_are_those_without_graphs(method: str, tree: str | None, folder: Path) -> None:
    config = {} if tree is None else {"speculative_token_tree": tree}
    plain = opened(folder, method, **config)
    want = guesses_of(plain)
    said = [in_turns(plain, everyone()) for _ in range(2)]  # the second time prefixes are cached
    llm, memory = opened(folder, method, **config), Played()
    give_graphs(llm, memory)
    got = guesses_of(llm)
    assert [in_turns(llm, everyone()) for _ in range(2)] == said
    assert len(got) > 100 and got == want
    forms = {key[3] for key in memory.keys if len(key) > 3}
    assert forms >= ({"APART"} if tree else {"APART", "WHOLE", "NARROWED"})
    assert memory.num_replays > 3 * len(memory.keys)


@pytest.mark.parametrize("method", FAMILIES)
def test_what_cannot_be_captured_runs_without_a_graph(
    method: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when a failed capture ends the request, is tried again, or is not in the log."""
    some = everyone()[:6]
    plain = opened(folder, method)
    want = guesses_of(plain)
    answer(plain, some)
    llm, memory = opened(folder, method), Failing()
    give_graphs(llm, memory)
    got = guesses_of(llm)
    with caplog.at_level(logging.WARNING, logger="quire"):
        answer(llm, some)
    assert got == want and memory.keys
    assert len(memory.keys) == len(set(memory.keys)) == len(caplog.records)


@pytest.mark.parametrize("method", FAMILIES)
def test_what_is_captured_ahead_need_not_be_captured_late(method: str, folder: Path) -> None:
    """Red when a size or a form is forgotten, or a piece of nobody writes to somebody's row."""
    plain = opened(folder, method)
    want = guesses_of(plain)
    usual = [(text, params) for text, params in everyone() if is_usual(params)]
    answer(plain, usual)
    llm, memory = opened(folder, method), Played()
    give_graphs(llm, memory)
    drafter, rows = drafter_of(llm), llm._engine.runner.rows
    before = rows.tokens[: rows.max_rows].clone()
    with torch.inference_mode():
        for piece in drafter.ahead():
            piece()
    assert torch.equal(rows.tokens[: rows.max_rows], before)
    captured, got = len(memory.keys), guesses_of(llm)
    answer(llm, usual)
    assert got == want and len(memory.keys) == captured


def is_usual(params: SamplingParams) -> bool:
    """Whether it asks for a temperature and filters at most."""
    asked = (params.structured_outputs, params.logit_bias, params.bad_words)
    return not any(asked) and not params.has_penalties and not params.allowed_token_ids


@pytest.mark.parametrize("method", FAMILIES)
def test_costs_are_those_of_graphs(method: str, folder: Path) -> None:
    """Red when a guess is measured without the graphs that it will have."""
    llm, memory = opened(folder, method), Played()
    give_graphs(llm, memory)
    for count in (1, 3):
        drafter_of(llm).rehearse(count)
    assert len(memory.keys) == (2 if method == "medusa" else 4)


def test_lasting_tensors_stay_where_they_are() -> None:
    """Red when a place moves, or a graph would read the rows of another."""
    kept = Lasting(6)
    kept.put("x", torch.ones(2, 3))
    at = kept.first("x", 2).data_ptr()
    kept.put_joined("x", [torch.full((1, 3), 2.0), torch.full((5, 3), 3.0)])
    found: list[Tensor] = kept.chosen(["x"], torch.tensor([5, 0]))
    assert kept.most == 8 and kept.first("x", 6).data_ptr() == at
    assert found[0].tolist() == [[3.0] * 3, [2.0] * 3]
