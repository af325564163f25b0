"""Drafts on CUDA with packed weights and coded caches, of another vocabulary, of a distilled exit.

Depths are drawn anew each step; answers are those without drafts. Red when the rows of drafts meet
other products or other codes than the decodes that they stand for, or when a model that drafts
writes where its target reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.distill.recipe import Shape
from tests.distill import case as lessons
from tests.gpu.test_gpu_spec import CROWDS, asked, opened
from tests.spec.cases import answer, at_random_depths, difference, undrafted
from tests.spec.test_vocabularies import turned

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int4 weights": {"quantization": "rtn-int4-g32"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}
CHAIN = {"adaptive": False, "num_speculative_tokens": 3}
CELLS = [
    ("ngram", "int4 weights", "crowded"),
    ("ngram", "int8 cache", "preempted"),
    ("itself", "plain", "preempted"),
    ("itself", "int4 weights", "chunked"),
    ("itself", "int8 cache", "crowded"),
    ("other words", "plain", "crowded"),
    ("other words", "int4 weights", "crowded"),
    ("cut exit", "int8 cache", "preempted"),
    ("distilled exit", "plain", "crowded"),
    ("distilled exit", "int4 weights", "chunked"),
    ("distilled exit", "int8 cache", "crowded"),
]
Plain = Callable[[str], list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    """Answers without drafts, by form."""
    found: dict[str, list[Any]] = {}

    def of(form: str) -> list[Any]:
        if form not in found:
            llm = undrafted(opened(folder, "llama", **FORMS[form]))
            found[form] = answer(llm, asked())
        return found[form]

    return of


def config_of(method: str, folder: Path) -> dict[str, Any]:
    model = folder / "llama"
    if method == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 1, **CHAIN}
    if method == "itself":
        return {"method": "draft_model", "model": str(model), **CHAIN}
    if method == "other words":
        other = folder / "other words"
        if not other.exists():
            turned(model, other, dropped=20)
        return {"method": "draft_model", "model": str(other), **CHAIN}
    if method == "cut exit":
        return {"method": "early_exit", **CHAIN}
    learned = folder / "exit"
    if not learned.exists():
        lessons.run(model, learned, Shape("early_exit", layers=1))
    return {"method": "early_exit", "model": str(learned), **CHAIN}


@pytest.mark.parametrize(("method", "form", "crowd"), CELLS)
def test_forms_change_nothing(
    method: str, form: str, crowd: str, folder: Path, plain: Plain
) -> None:
    want, words = plain(form), {**FORMS[form], **CROWDS[crowd]}
    llm = opened(folder, "llama", speculative_config=config_of(method, folder), **words)
    at_random_depths(llm)
    for _ in range(2):  # then with prefix hits
        got = answer(llm, asked())
        assert got == want, difference(asked(), got, want)
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_drafted_tokens
    if crowd == "preempted":
        assert stats.num_preempted > 0
