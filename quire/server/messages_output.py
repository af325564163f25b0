"""The Messages API's answer: the message object, its content blocks, and the events of its stream.

Pure values from segments; nothing here waits or talks to the engine. Anthropic counts cached tokens
apart from the rest of the input, so the two add up to the prompt.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from quire.server import sse
from quire.server.generation import Generation
from quire.server.segments import Change, Closed, Grew, Kind, Opened, Segment, Segments

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
PING = sse.named("ping", {"type": "ping"})


class MessageShape:
    """One message's unchanging part, and what is said of it as it grows."""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    # ------------------------------------------------------------ whole

    def body(self, segments: Segments, usage: dict[str, int]) -> dict[str, Any]:
        content = [_block(segment) for segment in segments.all]
        return self._head | {"content": content, **stop(segments), "usage": usage}

    # ------------------------------------------------------------ streamed

    def beginning(self, usage: dict[str, int]) -> bytes:
        message = self.body(Segments(), usage | {"output_tokens": 0})
        return sse.named("message_start", {"type": "message_start", "message": message}) + PING

    def ending(self, segments: Segments, usage: dict[str, int]) -> bytes:
        delta = {"type": "message_delta", "delta": stop(segments), "usage": usage}
        return sse.named("message_delta", delta) + sse.named(
            "message_stop", {"type": "message_stop"}
        )

    def change(self, change: Change) -> bytes:
        index = change.segment.index
        if isinstance(change, Opened):
            return _event("content_block_start", index, content_block=_empty(change.segment))
        if isinstance(change, Closed):
            return _event("content_block_stop", index)
        return _event("content_block_delta", index, delta=_delta(change))


def _event(type: str, index: int, **values: Any) -> bytes:
    return sse.named(type, {"type": type, "index": index, **values})


def _empty(segment: Segment) -> dict[str, Any]:
    if segment.kind is Kind.CALL:
        return {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": {}}
    if segment.kind is Kind.REASONING:
        # Signatures prove to Anthropic that thoughts are its own; there is nothing to prove here.
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block(segment: Segment) -> dict[str, Any]:
    empty = _empty(segment)
    if segment.kind is Kind.CALL:
        return empty | {"input": _input(segment)}
    key = "thinking" if segment.kind is Kind.REASONING else "text"
    return empty | {key: segment.text}


def _input(segment: Segment) -> msgspec.Raw:
    """A call's arguments as an object, closed where the output broke off.

    As the model wrote them: parsers vouch for the JSON, and reading it would only lose digits.
    """
    return msgspec.Raw((segment.text + segment.closing).encode() or b"{}")


def _delta(change: Grew) -> dict[str, Any]:
    if change.segment.kind is Kind.CALL:
        return {"type": "input_json_delta", "partial_json": change.delta}
    if change.segment.kind is Kind.REASONING:
        return {"type": "thinking_delta", "thinking": change.delta}
    return {"type": "text_delta", "text": change.delta}


def stop(segments: Segments) -> dict[str, Any]:
    """Why it ended; both null while it has not."""
    if segments.finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    found = segments.stop_reason
    if segments.finish == "stop" and isinstance(found, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": found}
    reason = STOP_REASONS.get(segments.finish, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def usage_of(generation: Generation) -> dict[str, int]:
    return {
        "input_tokens": generation.num_prompt - generation.num_cached,
        "cache_read_input_tokens": generation.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": generation.num_output,
    }
