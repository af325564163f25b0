"""Frames and messages between the two processes: bounded, typed, and never more than that."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from array import array
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine import commands as msg
from quire.engine.wire import MAX_FRAME, VERSION, Codec, Frames, check_head, receive, receive_async
from quire.errors import BadRequest, EngineDead
from quire.params import SamplingParams
from quire.request import Request
from quire.step import TokenEvent, TokenLogprobs

COMMANDS: Codec[msg.Command] = Codec(msg.Command)  # type: ignore[arg-type]
REPORTS: Codec[msg.Report] = Codec(msg.Report)  # type: ignore[arg-type]


def through_a_socket(frame: bytes) -> bytes | None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(frame)
        left.shutdown(socket.SHUT_WR)
        return receive(right)


def request(n: int = 1, **params: object) -> Request:
    made = [
        Request.new(i + 1, [5, 6, 7], SamplingParams(**params), max_tokens=9, seed=40 + i)
        for i in range(n)
    ]
    made[0].children = made[1:]
    return made[0]


def test_a_request_arrives_as_it_was_sent() -> None:
    """Red when a field of a request is lost between the processes."""
    sent = request(2, temperature=0.5, stop=["a"], logit_bias={3: 1.0}, logprobs=2)
    sent.priority, sent.cache_salt, sent.timing.arrival = 3, "salt", 12.5
    sent.tenant, sent.weight = "key", 2.5
    body = through_a_socket(COMMANDS.frame(msg.submit_of(sent)))
    assert body is not None
    command = COMMANDS.decode(body)
    assert isinstance(command, msg.Submit)
    leader, child = msg.requests_of(command)
    assert leader.children == [child]
    assert (leader.id, child.id, leader.seed, child.seed) == (1, 2, 40, 41)
    assert leader.tokens == child.tokens == array("i", [5, 6, 7])
    assert leader.params == sent.params
    assert (leader.priority, leader.cache_salt, leader.timing.arrival) == (3, "salt", 12.5)
    assert leader.max_tokens == 9
    assert {(r.tenant, r.weight) for r in (leader, child)} == {("key", 2.5)}


def test_events_arrive_as_they_were_sent() -> None:
    logprob = TokenLogprobs(3, -0.5, 1, (3, 4), (-0.5, -1.5))
    event = TokenEvent(1, [3], "stop", 3, (logprob,))
    back = REPORTS.decode(REPORTS.frame(msg.Events([event]))[5:])
    assert isinstance(back, msg.Events)
    assert list(back.events[0].tokens) == [3]
    assert back.events[0].finish == "stop"
    assert back.events[0].logprobs[0].logprob == -0.5


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_no_message(noise: bytes) -> None:
    """Red when bytes that are no message raise anything but EngineDead."""
    for codec in (COMMANDS, REPORTS):
        with suppress(EngineDead):
            codec.decode(noise)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63)
        | st.floats()
        | st.text(max_size=8)
        | st.binary(max_size=8)
        | st.sampled_from(["Submit", "Abort", "Events", "Beat"]),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["type", "id", "ids", "tokens"]), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_wrong_types_are_no_message(value: object) -> None:
    body = msgspec.msgpack.encode(value)
    for codec in (COMMANDS, REPORTS):
        with suppress(EngineDead):
            codec.decode(body)


@pytest.mark.parametrize("name", ["tokens", "hint"])
def test_half_a_token_id_is_no_message(name: str) -> None:
    """Red when a truncated list of ids gets past the decoder, to raise in the engine's loop."""
    whole = msgspec.to_builtins(msg.submit_of(request()), builtin_types=(bytes,))
    whole[name] = b"\x01\x02\x03"
    with pytest.raises(EngineDead, match="3 bytes of token ids"):
        COMMANDS.decode(msgspec.msgpack.encode(whole))


def test_params_out_of_range_are_no_message() -> None:
    whole = msgspec.to_builtins(msg.submit_of(request()), builtin_types=(bytes,))
    whole["params"]["temperature"] = -1.0
    with pytest.raises(EngineDead):
        COMMANDS.decode(msgspec.msgpack.encode(whole))


@pytest.mark.parametrize("tokens", [[], [-1], [7], [2**31 - 1]])
def test_ids_outside_the_vocabulary_stop_at_the_door(tokens: list[int]) -> None:
    """Red when an id that would fault on the device can reach it."""
    with pytest.raises(BadRequest):
        msg.check_ids(Request.new(1, tokens, SamplingParams()), vocab_size=7)
    msg.check_ids(Request.new(1, [0, 6], SamplingParams()), vocab_size=7)


@pytest.mark.parametrize(
    ("length", "version"), [(MAX_FRAME + 1, VERSION), (10, VERSION + 1), (2**32 - 1, 0)]
)
def test_a_frame_too_long_or_of_another_version_is_refused_unread(
    length: int, version: int
) -> None:
    """Red when a length from the other side is believed: four bytes could ask for 4 GB."""
    head = struct.pack("<IB", length, version)
    with pytest.raises(EngineDead, match="want version"):
        check_head(head)
    with pytest.raises(EngineDead):
        through_a_socket(head)


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 9])
def test_the_other_side_may_go_at_any_byte(cut: int) -> None:
    frame = COMMANDS.frame(msg.Abort([1, 2, 3]))
    assert through_a_socket(frame[:cut]) is None

    async def read() -> bytes | None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame[:cut])
        reader.feed_eof()
        return await receive_async(reader)

    assert asyncio.run(read()) is None


@given(st.data())
def test_frames_are_found_however_bytes_are_cut(data: st.DataObject) -> None:
    """Red when a frame is lost, or given twice, where two reads meet."""
    sent = [msg.Abort([id] * id) for id in data.draw(st.lists(st.integers(0, 30), max_size=8))]
    whole = b"".join(COMMANDS.frame(one) for one in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    frames, found = Frames(), []
    for begin, end in itertools.pairwise([0, *cuts, len(whole)]):
        found += [COMMANDS.decode(body) for body in frames.feed(whole[begin:end])]
    assert found == sent


def test_frames_that_are_none_are_refused() -> None:
    with pytest.raises(EngineDead, match="want version"):
        Frames().feed(COMMANDS.frame(msg.Abort([1])) + b"\x01\x00\x00\x00\x09")


def test_a_number_too_large_for_a_frame_is_the_clients_mistake() -> None:
    """Red when max_tokens=2**64 is an internal error."""
    with pytest.raises(BadRequest, match="64 bits"):
        COMMANDS.frame(msg.submit_of(request(max_tokens=2**64)))
