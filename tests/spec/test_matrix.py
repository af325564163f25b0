"""Every method, in every crowd, with every form of weights and cache: answers are those of none.

Depths are drawn anew each step. The short tier has a few cells of each row and column of the
table, the long one has all. Red when what a method adds to an engine (pages, states, a second
model) meets preemption, chunks, packed weights or a coded cache and leaves a trace in the answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.spec import heads
from tests.spec.cases import (
    FAMILIES,
    answer,
    at_random_depths,
    difference,
    everyone,
    open_tiny,
    undrafted,
)

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
CROWDS: dict[str, dict[str, Any]] = {
    "crowded": {},
    "alone": {"max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 24},
    "preempted": {"num_spare_pages": 8, "max_num_batched_tokens": 24},
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int4 weights": {"quantization": "rtn-int4-g32"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "adaptive": False},
    "suffix by cost": {"method": "suffix"},
    "early exit": {"method": "early_exit", "adaptive": False, "num_speculative_tokens": 3},
    "draft model": {"method": "draft_model", "adaptive": False, "num_speculative_tokens": 3},
    "suffix+model": {"method": "suffix+draft_model", "num_speculative_tokens": 4},
}
HEADS = ("eagle3", "eagle3 tree", "medusa", "medusa tree", "mtp", "mtp tree")


class Cell(NamedTuple):
    method: str
    family: str
    crowd: str
    form: str


ALL = [
    Cell(method, family, crowd, form)
    for method in (*METHODS, *HEADS)
    for family in FAMILIES
    for crowd in CROWDS
    for form in FORMS
    if not method.startswith("mtp") or family == "deepseek_v3"
]
SOME = [
    Cell("ngram", "llama", "preempted", "int4 weights"),
    Cell("ngram", "deepseek_v3", "crowded", "int8 cache"),
    Cell("suffix", "mixtral", "chunked", "plain"),
    Cell("suffix", "gemma3_text", "alone", "int8 cache"),
    Cell("suffix by cost", "llama", "chunked", "int8 cache"),
    Cell("early exit", "llama", "preempted", "int8 cache"),
    Cell("early exit", "deepseek_v3", "crowded", "plain"),
    Cell("early exit", "mixtral", "crowded", "int4 weights"),
    Cell("draft model", "llama", "preempted", "plain"),
    Cell("draft model", "gemma3_text", "chunked", "int4 weights"),
    Cell("suffix+model", "llama", "crowded", "int8 cache"),
    Cell("eagle3", "llama", "crowded", "int4 weights"),
    Cell("medusa tree", "llama", "crowded", "int8 cache"),
]
assert {cell.method for cell in SOME} >= set(METHODS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str, str], list[Any]]:
    """Answers without drafts, by family and form."""
    found: dict[tuple[str, str], list[Any]] = {}

    def of(family: str, form: str) -> list[Any]:
        if (family, form) not in found:
            llm = undrafted(open_tiny(folder, family, **FORMS[form]))
            found[family, form] = answer(llm, everyone())
        return found[family, form]

    return of


@pytest.mark.parametrize("cell", ALL if IS_LONG else SOME, ids=", ".join)
def test_methods_change_nothing(
    cell: Cell, folder: Path, plain: Callable[[str, str], list[Any]]
) -> None:
    want, config = plain(cell.family, cell.form), config_of(cell, folder)
    form, crowd = FORMS[cell.form], CROWDS[cell.crowd]
    llm = open_tiny(folder, cell.family, speculative_config=config, **form, **crowd)
    at_random_depths(llm)
    for _ in range(2):  # then with prefix hits
        got = answer(llm, everyone())
        assert got == want, difference(everyone(), got, want)
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_drafted_tokens
    if cell.crowd == "preempted":
        assert stats.num_preempted > 0
    if cell.method in ("ngram", "suffix"):
        assert 30 < stats.num_accepted_tokens < stats.num_drafted_tokens


def config_of(cell: Cell, folder: Path) -> dict[str, Any]:
    if cell.method in METHODS:
        config = dict(METHODS[cell.method])
        if "model" in config["method"]:  # the target's kin: a good drafter of the same tokens
            open_tiny(folder, "llama")
            config["model"] = str(folder / "llama")
        return config
    name, _, is_tree = cell.method.partition(" ")
    if name == "mtp" and not heads.has_mtp(folder / cell.family):
        heads.add_mtp(folder / cell.family)
    config = heads.head_for(name, folder, cell.family)
    if is_tree:
        config["speculative_token_tree"] = "[(0,), (1,), (0, 0), (1, 0), (2,)]"
        del config["num_speculative_tokens"]
    return config
