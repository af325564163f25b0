"""quire bench serve: repeatable work, figures that equal brute force, failures that have names."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.bench.serve.client import Outcome, Target
from quire.bench.serve.drive import closed_loop, open_loop
from quire.bench.serve.figures import Promise, figures, spread
from quire.bench.serve.stream import BadAnswer, StreamReading
from quire.bench.serve.work import SHAREGPT, asks, drawn_sizes, poisson_times, read_trace
from quire.cli.main import main
from quire.errors import BadRequest
from tests.bench.scripted_server import DONE, HEAD, answer, event, piece, serving, usage

# ------------------------------------------------------------ the work


def test_the_seed_says_everything() -> None:
    """Red when times, lengths or words come from a generator that is shared or unseeded."""
    made = [
        asks(poisson_times(50, 5.0, 3, seed), drawn_sizes(50, SHAREGPT, seed), seed, shared=4)
        for seed in (1, 1, 2)
    ]
    assert made[0] == made[1] != made[2]
    first, second = made[0][:2]
    assert first.prompt.split()[:4] == second.prompt.split()[:4] and first.prompt != second.prompt


def test_arrivals_have_the_rate_and_come_in_bursts() -> None:
    """Red when a burst multiplies the rate. 20,000 draws: the mean is within 5 %."""
    for burst in (1, 10):
        times = poisson_times(20_000, 50.0, burst, seed=3)
        assert times == sorted(times)
        assert 20_000 / times[-1] == pytest.approx(50.0, rel=0.05)
        assert all(times[i] == times[i - i % burst] for i in range(1_000))


def test_sharegpt_lengths_have_its_quantiles() -> None:
    sizes = drawn_sizes(20_000, SHAREGPT, 0)
    outputs = sorted(output for _, output in sizes)
    assert outputs[10_000] == pytest.approx(141, rel=0.1)
    assert sum(outputs) / len(outputs) == pytest.approx(216, rel=0.05)
    assert sum(prompt for prompt, _ in sizes) / len(sizes) == pytest.approx(238, rel=0.05)


def test_a_trace_keeps_its_times(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"at": 5.5, "prompt": 9, "output": 2}\n\n'
        '{"timestamp": 5000, "input_length": 3, "output_length": 4}\n'
    )
    assert read_trace(file, None) == ([0.0, 0.5], [(3, 4), (9, 2)])
    assert read_trace(file, 1) == ([0.0], [(3, 4)])
    for bad in ("{}", "[1]", "x", '{"at": -1, "prompt": 1, "output": 1}', ""):
        file.write_text(bad)
        with pytest.raises(BadRequest, match="--trace"):
            read_trace(file, None)


# ------------------------------------------------------------ bytes to events


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 700), max_size=12))
def test_an_answer_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    """Red when a chunk, an event or a head that spans two reads is lost or counted twice."""
    whole = HEAD + piece("a") + piece("b") + piece("", "length") + usage(5, 2) + DONE
    places = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    reading = StreamReading()
    for now, (start, end) in enumerate(pairwise(places)):
        reading.feed(whole[start:end], float(now))
    assert reading.is_complete and reading.status == 200 and reading.finish == "length"
    assert len(reading.token_times) == 2 and reading.token_times == sorted(reading.token_times)
    assert (reading.num_prompt_tokens, reading.num_output_tokens) == (5, 2)


def test_other_ways_to_end_an_answer() -> None:
    body = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}\r\n\r\n'
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    by_length, by_closing = StreamReading(), StreamReading()
    by_length.feed(stream + f"Content-Length: {len(body)}\r\n\r\n".encode() + body, 1.0)
    by_closing.feed(stream + b"\r\n" + body, 1.0)
    assert by_length.is_complete and not by_closing.is_complete
    by_closing.closed()
    assert by_closing.is_complete and by_closing.token_times == by_length.token_times == [1.0]
    for nonsense in (
        b"SSH-2.0-x\r\n",
        HEAD + b"zz\r\n",
        HEAD + b"7\r\ndata: {\r\n" + b"2\r\n\n\n\r\n",
    ):
        with pytest.raises(BadAnswer):
            StreamReading().feed(nonsense, 0.0)


# ------------------------------------------------------------ figures


def outcome(meant: float, times: list[float], **more: Any) -> Outcome:
    made = Outcome(meant, sent=meant, ended=times[-1], token_times=times, num_output=len(times))
    for name, value in more.items():
        setattr(made, name, value)
    return made


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=1200))
def test_percentiles_are_the_nearest_rank(values: list[float]) -> None:
    """Brute force: the smallest value that at least this share of all do not exceed."""
    found = spread(values)
    assert found is not None
    for name, share in (("p50", 500), ("p90", 900), ("p99", 990), ("p99.9", 999)):
        want = min(v for v in values if 1000 * sum(w <= v for w in values) >= share * len(values))
        assert found[name] == round(want * 1e3, 3)


def test_goodput_counts_what_kept_the_promise_among_all() -> None:
    """Red when failed requests leave the denominator, or a late send hides a wait."""
    good = outcome(0.0, [0.1, 0.15, 0.2])
    late_first = outcome(0.0, [0.5, 0.55], sent=0.45)  # the client was late; it counts all the same
    long_gap = outcome(0.0, [0.1, 0.4])
    failed = outcome(0.0, [1.0], failure="http 429", detail="full")
    found = figures([good, late_first, long_gap, failed], Promise.parse("ttft=200,gap=100"))
    assert found["goodput"]["share"] == 0.25 and found["goodput"]["requests_per_s"] == 1.0
    assert found["failures"] == {"http 429": 1} and found["requests"] == 4
    assert found["failure_details"] == {"http 429": ["full"]}
    assert found["output_tokens"] == 7
    for bad in ("ttft", "ttft=0", "speed=3", "ttft=200;gap=1"):
        with pytest.raises(BadRequest, match="--slo"):
            Promise.parse(bad)


# ------------------------------------------------------------ against a server


def work(count: int, every: float = 0.0) -> list[Any]:
    return asks([every * i for i in range(count)], [(8, 3)] * count, seed=0)


def test_delays_of_the_server_are_found_where_they_were() -> None:
    """Known delays are lower bounds for what is measured, and the order is kept."""
    delays = {0: [0.0, 0.0, 0.0], 1: [0.3, 0.0, 0.0], 2: [0.0, 0.0, 0.3]}

    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        assert body["stream"] and body["ignore_eos"] and body["max_tokens"] == 3
        await answer(writer, delays[int(body["prompt"].split()[0])])

    found = asyncio.run(serving(script, lambda url: open_loop(Target(url), work(3))))
    assert [o.failure for o in found] == [None] * 3
    record = figures(found, None)
    assert found[1].token_times[0] >= 0.3 and found[2].token_times[2] >= 0.3
    assert found[2].token_times[0] < 0.3 and found[0].token_times[2] < 0.3
    assert record["ttft_ms"]["max"] >= 300 and record["gap_ms"]["max"] >= 295
    assert (record["prompt_tokens"], record["output_tokens"]) == (21, 9)


def test_a_stall_is_paid_by_everyone_who_was_meant_to_be_served() -> None:
    """The server answers one at a time and stalls once: latency counts from the intended time.

    Red with coordinated omission: only the one request that met the stall would be slow."""
    turn = asyncio.Semaphore(1)
    count, every, stall = 20, 0.01, 0.5

    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        async with turn:
            await answer(writer, [stall if body["prompt"].startswith("0 ") else 0.0])

    found = asyncio.run(serving(script, lambda url: open_loop(Target(url), work(count, every))))
    for index, one in enumerate(found):
        assert one.meant == pytest.approx(every * index)
        assert one.token_times[0] - one.meant >= stall - every * index - 0.02
    record = figures(found, Promise.parse("ttft=250"))
    assert record["ttft_ms"]["p50"] >= 390
    assert record["goodput"]["share"] == 0.0


def test_a_closed_loop_has_as_many_at_once_as_it_was_told() -> None:
    seen, most = 0, 0

    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal seen, most
        seen += 1
        most = max(most, seen)
        await answer(writer, [0.01] * 3)
        seen -= 1

    found = asyncio.run(serving(script, lambda url: closed_loop(Target(url), work(12), 3)))
    assert most == 3 and len(found) == 12 and not any(o.failure for o in found)


def test_failures_have_names() -> None:
    """Red when a stream that broke off, or an error in the midst of one, counts as an answer."""

    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        kind = int(body["prompt"].split()[0])
        if kind == 0:
            body_ = b'{"error": {"message": "full"}}'
            head = f"HTTP/1.1 429 Too Many\r\nContent-Length: {len(body_)}\r\n\r\n"
            writer.write(head.encode() + body_)
        elif kind == 1:
            writer.write(HEAD + piece("a"))
        elif kind == 2:
            writer.write(HEAD + piece("a") + event({"error": {"message": "engine died"}}) + DONE)
        elif kind == 3:
            writer.write(HEAD + usage(3, 0) + piece("", "stop") + DONE)
        elif kind == 4:
            writer.write(b"hello?\r\n")
        elif kind == 5:
            await asyncio.sleep(1.0)
        elif kind == 7:
            await answer(writer, [0.0])
        await writer.drain()

    def target(url: str) -> Target:
        return Target(url, timeout_s=0.5)

    found = asyncio.run(serving(script, lambda url: open_loop(target(url), work(8))))
    assert [o.failure for o in found] == [
        "http 429",
        "broke off",
        "error in stream",
        "no text",
        "bad answer",
        "timeout",
        "connection lost",
        None,
    ]
    assert "full" in found[0].detail and found[2].detail == "engine died"


# ------------------------------------------------------------ the command


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        assert body["messages"][0]["role"] == "user"
        await answer(writer, [0.0] * body["max_tokens"])

    async def command(url: str) -> int:
        words = ["bench", "serve", "--url", url, "--api", "chat", "--requests", "6", "--rate"]
        words += ["200", "--output-len", "4", "--slo", "ttft=60000", "--out", str(tmp_path / "r")]
        return await asyncio.to_thread(main, words)

    assert asyncio.run(serving(script, command)) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["requests"], last["failed"], last["output_tokens"]) == (6, 0, 24)
    assert last["goodput"]["share"] == 1.0
    saved = json.loads((tmp_path / "r.json").read_text())
    assert len(saved["outcomes"]) == 6
    assert main(["bench", "serve", "--rate", "1", "--concurrency", "2"]) == 2
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--requests", "1"]) == 1
