"""The garbage collector during a batch: it leaves alone what was there before, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from quire.engine.heap import heap_at_rest
from quire.llm import LLM
from quire.params import SamplingParams
from quire.step import TokenEvent


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def only_when_asked() -> Iterator[None]:
    """No collection between the lines of a test, and nothing frozen before or after it."""
    gc.disable()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def dropped() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def test_what_was_there_is_not_walked_and_what_comes_is() -> None:
    old = dropped()
    with heap_at_rest():
        new = dropped()
        gc.collect()
        assert old() is not None and new() is None
    gc.collect()
    assert old() is None, "still frozen afterwards"


def test_an_error_thaws() -> None:
    with pytest.raises(RuntimeError, match="lost"), heap_at_rest():
        raise RuntimeError("lost")
    assert gc.get_freeze_count() == 0


def test_a_frozen_heap_stays_its_owner_s() -> None:
    gc.freeze()
    held = gc.get_freeze_count()
    with heap_at_rest():
        pass
    assert gc.get_freeze_count() >= held - 100  # objects may die meanwhile, thawing takes all


def test_an_interpreter_s_own_are_not_a_frozen_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with 375 frozen objects."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    old = dropped()
    with heap_at_rest():
        gc.collect()
        assert old() is not None


def test_every_step_of_a_batch(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    seen: list[bool] = []
    step = llm._engine.core.step

    def watched() -> list[TokenEvent]:
        seen.append(gc.get_freeze_count() > 0)
        return step()

    monkeypatch.setattr(llm._engine.core, "step", watched)
    llm.generate(["a", "b"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(seen) >= 4 and all(seen)
    assert gc.get_freeze_count() == 0
