"""One LLM in several threads: everyone gets exactly their tokens, from shared batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import BadRequest

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["the quick brown fox", "def main():", "naïve café", "the lazy dog", "over", "jumps"]
PATIENCE_S = 60.0  # only what hangs takes this long


@pytest.fixture(params=[0, 1], ids=["in-step", "overlap"])
def llm(make_llm: Callable[..., LLM], request: pytest.FixtureRequest) -> LLM:
    llm = make_llm()
    llm._engine.core.lag = request.param
    return llm


def tokens(llm: LLM, prompt: Any, params: SamplingParams = PARAMS) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def streamed(llm: LLM, prompt: Any, params: SamplingParams = PARAMS) -> list[int]:
    return [token for event in llm.stream(prompt, params) for token in event.token_ids]


class Task(threading.Thread):
    """A call in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work, self.value, self.error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.work()
        except BaseException as error:
            self.error = error

    def result(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it never returns"
        if self.error is not None:
            raise self.error
        return self.value


class InStep:
    """Does something in the middle of the n-th step, while a thread has the turn."""

    def __init__(self, llm: LLM, number: int, action: Callable[[], None]) -> None:
        self.core = llm._engine.core
        self.step, self.left, self.action = self.core.step, number, action
        self.batches: list[int] = []
        self.core.step = self  # type: ignore[method-assign, assignment]

    def __call__(self) -> Any:
        self.left -= 1
        if self.left == 0:
            self.action()
        events = self.step()
        self.batches.append(len(self.core.last_plan.works))
        return events


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_live) == (0, 0, 0)


@pytest.mark.parametrize("call", [tokens, streamed])
def test_every_thread_gets_its_own_tokens(llm: LLM, call: Callable[..., list[int]]) -> None:
    """Red when two threads step at once: wrong tokens, or a call that never returns."""
    want = [tokens(llm, prompt) for prompt in PROMPTS]
    for _ in range(3):
        tasks = [Task(lambda p=prompt: [call(llm, p) for _ in range(3)]) for prompt in PROMPTS]
        assert [task.result() for task in tasks] == [[answer] * 3 for answer in want]
    assert_idle(llm)


def test_threads_share_batches(llm: LLM) -> None:
    """Red when a call waits until another thread's is done."""
    want = [tokens(llm, prompt) for prompt in PROMPTS[:2]]
    joined: list[Task] = []

    def join() -> None:
        joined.append(Task(lambda: tokens(llm, PROMPTS[1])))
        wait_for(lambda: llm._loop._num_asking == 1)

    hook = InStep(llm, 3, join)
    assert Task(lambda: tokens(llm, PROMPTS[0])).result() == want[0]
    assert joined[0].result() == want[1], "nobody stepped on when the first thread left"
    assert hook.batches.count(2) > 15
    assert_idle(llm)


def test_looking_does_not_wait_for_the_end(llm: LLM) -> None:
    """Red when stats or the cache are only reached between calls, or in the middle of a step."""
    seen: list[Task] = []

    def look() -> None:
        seen.append(Task(lambda: (llm.stats().num_running, llm.reset_prefix_cache())))
        wait_for(lambda: llm._loop._num_asking == 1)

    InStep(llm, 3, look)
    tokens(llm, PROMPTS[0])
    assert seen[0].result()[0] == 1


def test_a_refusal_in_one_thread_leaves_the_other(llm: LLM) -> None:
    """Red when a bad request takes the turn with it."""
    want = tokens(llm, PROMPTS[0])
    good = Task(lambda: [tokens(llm, PROMPTS[0]) for _ in range(4)])
    bad = [Task(lambda: llm.generate(["fine", [10**9]], PARAMS)) for _ in range(4)]
    for task in bad:
        with pytest.raises(BadRequest):
            task.result()
    assert good.result() == [want] * 4
    assert_idle(llm)


def test_ctrl_c_in_a_step_strands_nobody(llm: LLM) -> None:
    """Red when the thread that was not interrupted waits for ever, or gets wrong tokens."""
    want = tokens(llm, PROMPTS[1])
    others: list[Task] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    def join() -> None:
        others.append(Task(lambda: llm.generate(PROMPTS[1], PARAMS, use_tqdm=False)))
        wait_for(lambda: llm._loop._num_asking == 1)
        hook.left, hook.action = 5, interrupt  # both are in by then, and neither is done

    hook = InStep(llm, 3, join)
    interrupted = Task(lambda: list(llm.stream(PROMPTS[0], PARAMS)))
    interrupted.join(PATIENCE_S)
    (answer,) = others[0].result() if others[0].error is None else [None]
    errors = [interrupted.error, others[0].error]
    assert [type(e) for e in errors].count(KeyboardInterrupt) == 1, "one thread was stepping"
    if answer is not None:
        assert answer.outputs[0].finish_reason == "error"
        assert "KeyboardInterrupt" in answer.outputs[0].stop_reason
        assert answer.outputs[0].token_ids == want[: len(answer.outputs[0].token_ids)]
    assert tokens(llm, PROMPTS[1]) == want
    assert_idle(llm)


def test_a_stream_closed_in_the_middle_of_a_step(llm: LLM) -> None:
    """Red when the garbage collector, which may close one anywhere, makes a thread wait for
    itself, or a request is taken from under a step."""
    want = tokens(llm, PROMPTS[0])

    def work() -> list[int]:
        abandoned = llm.stream(PROMPTS[1], PARAMS)
        next(abandoned)
        hook = InStep(llm, 3, abandoned.close)  # type: ignore[attr-defined]
        found = tokens(llm, PROMPTS[0])
        assert hook.batches[2:5] == [2, 1, 1], "it went on"
        return found

    assert Task(work).result() == want
    assert_idle(llm)


def test_a_stream_closed_by_another_thread(llm: LLM) -> None:
    """Red when a request outlives the stream it belonged to."""
    want = tokens(llm, PROMPTS[0])
    abandoned = llm.stream(PROMPTS[1], PARAMS)
    next(abandoned)

    def close() -> None:
        Task(abandoned.close).result()  # type: ignore[attr-defined]  # it does not wait

    InStep(llm, 3, close)
    assert Task(lambda: tokens(llm, PROMPTS[0])).result() == want
    assert_idle(llm)
