"""The garbage collector during a batch: no full collection then, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from quire.engine.collector import no_collection, no_full_collection
from quire.llm import LLM
from quire.params import SamplingParams

EAGER = (10, 1, 1)  # collect all the time


class Collections:
    """How many there were of each generation, and what they found."""

    def __init__(self) -> None:
        self.num, self.found = [0, 0, 0], 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.num[info["generation"]] += 1
            self.found += info["collected"]


@pytest.fixture
def seen() -> Iterator[Collections]:
    """With all that was there before out of the way, so that a quarter of the heap, which must be
    new for a full collection, is little."""
    usual, counted = gc.get_threshold(), Collections()
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.callbacks.append(counted)
    gc.set_threshold(*EAGER)
    yield counted
    gc.callbacks.remove(counted)
    gc.set_threshold(*usual)
    gc.unfreeze()


def churn() -> list[list[int]]:
    return [[i] for i in range(5000)]


def test_only_full_collections_wait(seen: Collections) -> None:
    with no_full_collection():
        before = list(seen.num)
        kept = churn()
        assert seen.num[2] == before[2] and seen.num[1] > before[1]
    kept += churn()
    assert seen.num[2] > before[2], "none afterwards, either"
    assert gc.get_threshold() == EAGER


def test_an_error_puts_it_back() -> None:
    usual = gc.get_threshold()
    with pytest.raises(RuntimeError, match="lost"), no_full_collection():
        raise RuntimeError("lost")
    assert gc.get_threshold() == usual


def test_batches_that_overlap_put_back_what_was_there_before_both() -> None:
    usual = gc.get_threshold()
    first, second = no_full_collection(), no_full_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == usual


def test_a_batch_sees_none_and_leaves_no_cycles(
    make_llm: Callable[..., LLM], seen: Collections
) -> None:
    """Red when a step makes garbage that reference counts do not find: it would wait, too."""
    llm = make_llm()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    llm.generate(["warm", "up"], params, use_tqdm=False)
    gc.collect()
    before, found = list(seen.num), seen.found
    llm.generate(["a", "b", "c", "d"] * 4, params, use_tqdm=False)
    assert seen.num[2] == before[2] and seen.num[1] > before[1]
    gc.collect()
    assert seen.found - found < 20, "cycles"  # in 40 steps; other threads may leave one


def test_a_start_sees_no_collection_and_what_it_made_is_old() -> None:
    """Red when the next young collection walks all that building an engine has made."""
    counted, usual = Collections(), gc.get_threshold()
    gc.callbacks.append(counted)
    gc.set_threshold(*EAGER)
    try:
        with no_collection():
            before = list(counted.num)
            kept = churn()
            during = list(counted.num)
    finally:
        gc.callbacks.remove(counted)
        gc.set_threshold(*usual)
    assert during == before
    old = {id(item) for item in gc.get_objects(generation=2)}
    assert all(id(item) in old for item in kept)
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
