"""Speculation changes nothing: tokens, texts, logprobs and reasons are those without it.

Every kind of request runs in one crowd, with depths drawn anew each step. Turns red when a draw
takes the noise of another position, when penalties, bans or masks at a draft see another history
than they would without it, when a refused draft leaves a trace in pages, rows, matchers or the
prefix tree, or when an end inside an accepted run is missed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.grammar.matcher import Matcher
from quire.memory.pool import PagePool
from quire.runner import gather, runner, trees
from quire.runner import sampling as sampling_inputs
from quire.sample import cpu_ops, gumbel
from tests.spec import heads
from tests.spec.cases import FAMILIES, TEXTS, Told, answer, everyone, open_tiny, sampling, undrafted

CROWDS: dict[str, dict[str, Any]] = {
    "crowded": {},
    "alone": {"max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 24},
    "preempted": {"num_spare_pages": 8, "max_num_batched_tokens": 24},
    "eager": {"enforce_eager": True},
    "uncached": {"enable_prefix_caching": False},
}
SOME = {("gemma3_text", "preempted"), ("deepseek_v3", "chunked"), ("mixtral", "uncached")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[object]]:
    """Answers without speculation, by family."""
    return {family: answer(undrafted(open_tiny(folder, family)), everyone()) for family in FAMILIES}


IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
CROSS = [
    (family, crowd)
    for family in FAMILIES
    for crowd in CROWDS
    if IS_LONG or family == "llama" or (family, crowd) in SOME
]


@pytest.mark.parametrize(("family", "crowd"), CROSS)
def test_drafts_change_nothing(
    family: str, crowd: str, folder: Path, plain: dict[str, list[object]]
) -> None:
    llm = open_tiny(folder, family, **CROWDS[crowd])
    told = Told.of(llm, everyone())
    assert answer(llm, everyone()) == plain[family]  # with prefix hits, too
    assert told.num_accepted > 200 and told.num_refused > 100
    if crowd == "preempted":
        assert llm.stats().num_preempted > 0


SOME_TREES = {
    *(("llama", crowd) for crowd in ("crowded", "alone", "preempted", "eager")),
    *(("gemma3_text", "preempted"), ("deepseek_v3", "chunked"), ("mixtral", "chunked")),
}
TREES = [
    (family, crowd)
    for family in FAMILIES
    for crowd in CROWDS
    if IS_LONG or (family, crowd) in SOME_TREES
]


@pytest.mark.parametrize(("family", "crowd"), TREES)
def test_trees_change_nothing(
    family: str, crowd: str, folder: Path, plain: dict[str, list[object]]
) -> None:
    """Trees of any shape, another each step: also red when one draft sees a sibling, or when one
    that was right is left in a slot that is not its own."""
    llm = open_tiny(folder, family, **CROWDS[crowd])
    told = Told.of(llm, everyone(), branching=0.4)
    assert answer(llm, everyone()) == plain[family]
    assert told.num_accepted > 200 and told.num_refused > 100
    if crowd == "preempted":
        assert llm.stats().num_preempted > 0


HEADS = [
    ("suffix+eagle3", "llama", "crowded"),
    ("eagle3", "llama", "preempted"),
    ("eagle3", "gemma3_text", "chunked"),
    ("medusa", "llama", "preempted"),
    ("mtp", "deepseek_v3", "chunked"),
    ("eagle3 tree", "llama", "preempted"),
    ("eagle3 tree", "gemma3_text", "chunked"),
    ("medusa tree", "llama", "crowded"),
    ("mtp tree", "deepseek_v3", "chunked"),
]
if IS_LONG:
    HEADS = [
        (method, family, crowd)
        for name in ("eagle3", "suffix+eagle3", "medusa", "mtp")
        for method in (name, f"{name} tree")
        for family in (FAMILIES if name != "mtp" else ("deepseek_v3",))
        for crowd in CROWDS
    ]


@pytest.mark.parametrize(("method", "family", "crowd"), HEADS)
def test_heads_change_nothing(
    method: str, family: str, crowd: str, folder: Path, plain: dict[str, list[object]]
) -> None:
    """Random heads, which are mostly wrong; `test_right_heads.py` has those that are not."""
    name, _, is_tree = method.partition(" ")
    if name == "mtp" and not heads.has_mtp(folder / family):
        heads.add_mtp(folder / family)
    config = heads.head_for(name, folder, family)
    if is_tree:
        config["speculative_token_tree"] = "[(0,), (1,), (0, 0), (1, 0), (2,)]"
        del config["num_speculative_tokens"]
    llm = open_tiny(folder, family, speculative_config=config, **CROWDS[crowd])
    assert answer(llm, everyone()) == plain[family]
    assert answer(llm, everyone()) == plain[family]
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    if crowd == "preempted":
        assert stats.num_preempted > 0


# ------------------------------------------------------------ planted bugs


def noise_of_the_wrong_position(patch: pytest.MonkeyPatch) -> None:
    def row_keys(seeds: Any, positions: Any) -> Any:
        shifted = positions.copy()
        repeats = np.flatnonzero(np.diff(positions, prepend=-9) == 1)
        shifted[repeats] -= 1  # a draft's draw takes the noise of the draw before
        return gumbel.row_keys(seeds, shifted)

    patch.setattr(cpu_ops, "row_keys", row_keys)


def grammar_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Matcher, "fork", lambda self: self)


def history_without_drafts(patch: pytest.MonkeyPatch) -> None:
    """Penalties at a draft see what they saw before the first."""

    def sample_inputs(rows: Any, shape: Any, *more: Any) -> Any:
        made = sampling_inputs.sample_inputs(rows, shape, *more)
        if made.history is None:
            return made
        firsts = torch.from_numpy(shape.starts[shape.sampled] + 1).long()
        return replace(made, history=replace(made.history, lens=firsts))

    patch.setattr(runner, "sample_inputs", sample_inputs)


def row_of_the_first_sample(patch: pytest.MonkeyPatch) -> None:
    """All logits of a run are taken where its first token was fed."""
    plain = gather.StepShape._set_samples

    def set_samples(self: Any, counts: Any) -> None:
        plain(self, counts)
        firsts = np.searchsorted(self.sampled, self.sampled)
        self.sample_ends = self.sample_ends[firsts]

    patch.setattr(gather.StepShape, "_set_samples", set_samples)


def wrong_slot_after_a_rejection(patch: pytest.MonkeyPatch) -> None:
    """The keys of what was drawn go astray, and those of the refused draft stay in their place."""
    plain, fed_last = gather.fed_tokens, dict[int, tuple[int, int]]()

    def fed_tokens(rows: Any, token_rows: Any, positions: Any, *more: Any) -> Any:
        made = plain(rows, token_rows, positions, *more)
        runs: dict[int, list[int]] = {}
        for at, (row, position) in enumerate(
            zip(token_rows.tolist(), positions.tolist(), strict=True)
        ):
            runs.setdefault(row, []).append(position)
            start, end = fed_last.get(row, (0, 0))
            if start < position < end:
                made.slots[:, at] = 0  # of the scratch page
        fed_last.update({row: (run[0], run[-1] + 1) for row, run in runs.items()})
        return made

    patch.setattr(gather, "fed_tokens", fed_tokens)


PLANTS = (
    wrong_slot_after_a_rejection,
    noise_of_the_wrong_position,
    grammar_not_rolled_back,
    history_without_drafts,
    row_of_the_first_sample,
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(
    plant: Any, folder: Path, plain: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above must see these, or it proves nothing."""
    llm = open_tiny(folder, "llama")
    Told.of(llm, everyone(), error=0.1)
    plant(monkeypatch)
    assert answer(llm, everyone()) != plain["llama"]


def right_drafts_left_behind(patch: pytest.MonkeyPatch) -> None:
    """The wrong slot after a rejection: keys of what was right stay where the tree had them."""
    patch.setattr(PagePool, "move", lambda *step: None)


def siblings_are_read(patch: pytest.MonkeyPatch) -> None:
    """A draft finds the drafts before it where a chain would have them."""

    def paths(parents: Any) -> Any:
        made = trees._paths.__wrapped__(parents).copy()
        made[:, 1:] = np.where(made[:, 1:] > 0, np.arange(1, made.shape[1]), 0)
        return made

    patch.setattr(trees, "_paths", paths)


def history_of_siblings(patch: pytest.MonkeyPatch) -> None:
    """Penalties and bad words see drafts in the order in which they lie."""

    def history(self: Any, tokens: Any, rows: Any, fed: Any, lens: Any, *rest: Any) -> Any:
        return tokens[rows, : int(lens.max())]

    patch.setattr(trees.StepTrees, "history", history)


TREE_PLANTS = (
    right_drafts_left_behind,
    siblings_are_read,
    history_of_siblings,
    grammar_not_rolled_back,
    noise_of_the_wrong_position,
)


@pytest.mark.parametrize("plant", TREE_PLANTS, ids=lambda plant: plant.__name__)
def test_planted_bug_in_trees_is_caught(
    plant: Any, folder: Path, plain: dict[str, list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_tiny(folder, "llama")
    Told.of(llm, everyone(), error=0.1, branching=0.4)
    plant(monkeypatch)
    assert answer(llm, everyone()) != plain["llama"]


def test_requests_may_decline(folder: Path) -> None:
    """Red when num_speculative_tokens of a request, or vLLM's extra_args, are not heeded."""
    config = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    llm = open_tiny(folder, "llama", speculative_config=config)
    text = TEXTS[0]
    for off in ({"num_speculative_tokens": 0}, {"extra_args": {"num_speculative_tokens": 0}}):
        (output,) = llm.generate(text, sampling("greedy", 1, **off), use_tqdm=False)
        assert output.metrics is not None and output.metrics.num_drafted_tokens == 0
    (output,) = llm.generate(text, sampling("greedy", 1), use_tqdm=False)
    assert output.metrics is not None and output.metrics.num_drafted_tokens > 0
    assert 0 < output.metrics.num_accepted_tokens <= output.metrics.num_drafted_tokens
