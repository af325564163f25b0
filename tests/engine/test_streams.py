"""Streams: pieces add up to the whole, leave nothing behind, and stand company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from quire import LLM, SamplingParams, StreamEvent
from quire.errors import BadRequest

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["the quick brown fox", "def main():", "naïve café"]


@pytest.fixture(params=[0, 1], ids=["in-step", "overlap"])
def llm(make_llm: Callable[..., LLM], request: pytest.FixtureRequest) -> LLM:
    llm = make_llm()
    llm._engine.core.lag = request.param
    return llm


def answer(llm: LLM, prompt: Any, params: SamplingParams = PARAMS) -> Any:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def ids(events: list[StreamEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def drained(stream: Iterator[StreamEvent], most: int = 200) -> list[StreamEvent]:
    """All events; a stream that never ends is an error, not a hang."""
    events = list(islice(stream, most))
    assert len(events) < most
    return events


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_live) == (0, 0, 0)


def test_pieces_add_up(llm: LLM) -> None:
    """Red when a piece is lost, repeated, or comes after the end."""
    want = answer(llm, PROMPTS[0])
    events = drained(llm.stream(PROMPTS[0], PARAMS))
    assert "".join(e.text for e in events) == want.text
    assert ids(events) == want.token_ids
    assert [e.finish_reason for e in events if e.finish_reason] == ["length"]
    assert events[-1].finish_reason == "length"
    assert len(events) > 10, "pieces come as they are drawn"


def test_stop_string_in_a_stream(llm: LLM) -> None:
    """Red when a stream shows a part of the stop string before it is complete."""
    text = answer(llm, PROMPTS[0]).text
    stop = text[8:12]
    events = drained(llm.stream(PROMPTS[0], PARAMS.with_(stop=stop)))
    assert "".join(e.text for e in events) == text[: text.index(stop)]
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
    assert_idle(llm)


def test_copies_in_a_stream(llm: LLM) -> None:
    """Red when pieces of different copies are mixed up."""
    params = PARAMS.with_(temperature=1.0, n=3, seed=4)
    want = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs
    events = drained(llm.stream(PROMPTS[0], params))
    for output in want:
        own = [e for e in events if e.index == output.index]
        assert ids(own) == output.token_ids
        assert own[-1].finish_reason == "length"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_events", [0, 1, 5])
def test_closing_a_stream_frees_everything(llm: LLM, num_events: int, n: int) -> None:
    """Red when an abandoned stream keeps its pages, its row, or unborn copies."""
    params = PARAMS.with_(temperature=1.0, n=n)
    stream = llm.stream(PROMPTS[0], params)
    for _ in range(num_events):
        next(stream)
    stream.close()
    assert_idle(llm)
    assert answer(llm, PROMPTS[1]).finish_reason == "length"
    assert_idle(llm)


def test_a_bad_request_does_not_disturb_a_stream(llm: LLM) -> None:
    """Red when a refusal leaves a trace in the engine."""
    want = answer(llm, PROMPTS[0])
    stream = llm.stream(PROMPTS[0], PARAMS)
    events = [next(stream), next(stream)]
    far = PARAMS.with_(allowed_token_ids=[10**6])
    for prompt, params in (([10**9], PARAMS), ("x" * 5000, PARAMS), ("x", far), ([], PARAMS)):
        with pytest.raises(BadRequest):
            llm.generate(["fine", prompt], params, use_tqdm=False)
        with pytest.raises(BadRequest):
            llm.stream(prompt, params)
    events += drained(stream)
    assert ids(events) == want.token_ids
    assert_idle(llm)


def test_two_streams_at_once(llm: LLM) -> None:
    """Red when one iterator's step swallows the other's tokens, or waits for ever for them."""
    want = [answer(llm, prompt).token_ids for prompt in PROMPTS[:2]]
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS[:2]]
    seen: list[list[StreamEvent]] = [[], []]
    for _ in range(4):
        for events, stream in zip(seen, streams, strict=True):
            events.append(next(stream))
    for events, expected in zip(seen, want, strict=True):
        assert ids(events) == expected[: len(ids(events))], "tokens were lost between two pieces"
    for events, stream in zip(seen, streams, strict=True):
        events += drained(stream)
    assert [ids(events) for events in seen] == want
    assert_idle(llm)


def test_generate_while_a_stream_is_open(llm: LLM) -> None:
    """Red when a batch job in the middle of a stream fails, or eats the stream's tokens."""
    want = [answer(llm, prompt).token_ids for prompt in PROMPTS[:2]]
    stream = llm.stream(PROMPTS[0], PARAMS)
    events = [next(stream), next(stream)]
    assert answer(llm, PROMPTS[1]).token_ids == want[1]
    events += drained(stream)
    assert ids(events) == want[0]
    assert events[-1].finish_reason == "length"
    assert_idle(llm)


def test_closing_one_stream_leaves_the_other(llm: LLM) -> None:
    """Red when an abandoned stream takes its neighbour along."""
    want = answer(llm, PROMPTS[0]).token_ids
    kept, dropped = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
    events = [next(kept)]
    next(dropped)
    dropped.close()
    events += drained(kept)
    assert ids(events) == want
    assert_idle(llm)


def lose_one_step(llm: LLM, error: Exception) -> None:
    """The next draw raises, once; a stream that never ends is an error, not a hang."""
    core, runner = llm._engine.core, llm._engine.runner
    sampler, step, num_steps = runner.sampler, core.step, 0

    def failing(*args: Any) -> Any:
        runner.sampler = sampler
        raise error

    def counted() -> Any:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 200, "the stream never ends"
        return step()

    runner.sampler, core.step = failing, counted


def test_a_lost_step_costs_no_stream_a_token(llm: LLM) -> None:
    """Red when a fault ends streams it had nothing to do with, or they go on from half a step."""
    want = [answer(llm, prompt).token_ids for prompt in PROMPTS[:2]]
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS[:2]]
    seen = [[next(stream)] for stream in streams]
    lose_one_step(llm, RuntimeError("a kernel failed"))
    for events, stream in zip(seen, streams, strict=True):
        events += drained(stream)
    assert [ids(events) for events in seen] == want
    assert_idle(llm)


def test_a_lost_device_ends_every_stream(llm: LLM) -> None:
    """Red when a neighbour's stream goes on from half a step: wrong tokens, or no end at all."""
    want = answer(llm, PROMPTS[1]).token_ids
    first, second = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
    next(first)
    events = [next(second)]
    lose_one_step(llm, RuntimeError("CUDA error: device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        drained(first)
    events += drained(second)
    assert events[-1].finish_reason == "error"
    assert "device lost" in str(events[-1].stop_reason)
    assert ids(events) == want[: len(ids(events))]
    assert_idle(llm)
    assert answer(llm, PROMPTS[1]).token_ids == want, "the engine serves again"
