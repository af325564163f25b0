"""The Responses API's answer: the response object, its output items, and the events of its stream.

Pure values from segments; nothing here waits or talks to the engine. Ids are the response's own
random part with the item's place behind it, so an item is called the same in every event.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, NamedTuple

from quire.server import sse
from quire.server.problems import Problem
from quire.server.responses_input import ResponsesFields
from quire.server.segments import Change, Closed, Grew, Kind, Opened, Segment, Segments

PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}
INCOMPLETE = {"length": "max_output_tokens"}
SERVER_ERROR, RATE_LIMIT = "server_error", "rate_limit_exceeded"  # the codes the SDK's types know


class Said(NamedTuple):
    """What a response says of how it is made."""

    model: str
    temperature: float
    top_p: float
    is_stored: bool = False
    conversation_id: str | None = None


class Made(NamedTuple):
    token: str
    created_at: int


class ResponseShape:
    """One response's unchanging part, and what is said of it as it grows."""

    def __init__(self, fields: ResponsesFields, said: Said, made: Made | None = None) -> None:
        """`made`: who it is, where that is known already."""
        made = made or Made(secrets.token_hex(16), int(time.time()))
        self._token = made.token
        self._sequence = -1
        self._head = {
            **_echo(fields, said),
            "id": f"resp_{self._token}",
            "object": "response",
            "created_at": made.created_at,
            "model": said.model,
            "temperature": said.temperature,
            "top_p": said.top_p,
        }

    # ------------------------------------------------------------ whole

    def body(self, status: str, segments: Segments, usage: dict[str, Any] | None) -> dict[str, Any]:
        """The response object as it stands."""
        is_over = status == "completed"
        return self._head | {
            "status": status,
            "completed_at": int(time.time()) if is_over else None,
            "error": None,
            "incomplete_details": None,
            "output": [self.item(segment, status) for segment in segments.all],
            "usage": usage,
        }

    def finished(self, segments: Segments, usage: dict[str, Any]) -> dict[str, Any]:
        if segments.finish in ("stop", "tool_calls"):
            return self.body("completed", segments, usage)
        reason = INCOMPLETE.get(segments.finish or "")
        return self.body("incomplete", segments, usage) | {"incomplete_details": {"reason": reason}}

    def item(self, segment: Segment, status: str = "completed") -> dict[str, Any]:
        """A finished item, unless the response as a whole is still in progress."""
        if status != "in_progress":
            status = "incomplete" if segment.is_cut else "completed"
        base: dict[str, Any] = {"id": self._id(segment), "status": status}
        if segment.kind is Kind.CALL:
            return base | {
                "type": "function_call",
                "call_id": segment.call_id,
                "name": segment.name,
                "arguments": segment.text,
            }
        if segment.kind is Kind.REASONING:
            return base | {"type": "reasoning", "summary": [], "content": [_part(segment)]}
        return base | {"type": "message", "role": "assistant", "content": [_part(segment)]}

    def _id(self, segment: Segment) -> str:
        return f"{PREFIXES[segment.kind]}_{self._token}{segment.index:04x}"

    # ------------------------------------------------------------ streamed

    def event(self, type: str, **values: Any) -> bytes:
        """The next event of the stream."""
        self._sequence += 1
        return sse.named(type, {"type": type, "sequence_number": self._sequence, **values})

    def beginning(self) -> bytes:
        body = self.body("in_progress", Segments(), None)
        return self.event("response.created", response=body) + self.event(
            "response.in_progress", response=body
        )

    def ending(self, body: dict[str, Any]) -> bytes:
        """`body`: what `finished` gave."""
        return self.event(f"response.{body['status']}", response=body)

    def failed(self, problem: Problem, segments: Segments) -> dict[str, Any]:
        code = RATE_LIMIT if problem.status == 429 else SERVER_ERROR
        error = {"code": code, "message": problem.message}
        return self.body("failed", segments, None) | {"error": error}

    def failure(self, problem: Problem, segments: Segments) -> bytes:
        return self.event("response.failed", response=self.failed(problem, segments))

    def change(self, change: Change) -> bytes:
        if isinstance(change, Opened):
            return self._opened(change.segment)
        if isinstance(change, Closed):
            return self._closed(change.segment)
        return self._grew(change)

    def _opened(self, segment: Segment) -> bytes:
        segment = segment.blank()
        empty = self.item(segment, "in_progress")
        place = {"item_id": empty["id"], "output_index": segment.index, "content_index": 0}
        if segment.kind is Kind.CALL:
            return self.event("response.output_item.added", output_index=segment.index, item=empty)
        empty["content"] = []
        added = self.event("response.output_item.added", output_index=segment.index, item=empty)
        return added + self.event("response.content_part.added", **place, part=_part(segment))

    def _grew(self, change: Grew) -> bytes:
        segment = change.segment
        values: dict[str, Any] = {
            "item_id": self._id(segment),
            "output_index": segment.index,
            "delta": change.delta,
        }
        if segment.kind is Kind.CALL:
            return self.event("response.function_call_arguments.delta", **values)
        values["content_index"] = 0
        if segment.kind is Kind.REASONING:
            return self.event("response.reasoning_text.delta", **values)
        return self.event("response.output_text.delta", **values, logprobs=change.logprobs)

    def _closed(self, segment: Segment) -> bytes:
        item, text = self.item(segment), segment.text
        place: dict[str, Any] = {"item_id": item["id"], "output_index": segment.index}
        if segment.kind is Kind.CALL:
            said = self.event(
                "response.function_call_arguments.done", **place, name=segment.name, arguments=text
            )
        else:
            place["content_index"] = 0
            if segment.kind is Kind.REASONING:
                said = self.event("response.reasoning_text.done", **place, text=text)
            else:
                said = self.event(
                    "response.output_text.done", **place, text=text, logprobs=segment.logprobs
                )
            said += self.event("response.content_part.done", **place, part=_part(segment))
        return said + self.event("response.output_item.done", output_index=segment.index, item=item)


def _part(segment: Segment) -> dict[str, Any]:
    if segment.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": segment.text}
    return {
        "type": "output_text",
        "text": segment.text,
        "annotations": [],
        "logprobs": segment.logprobs,
    }


def _echo(fields: ResponsesFields, said: Said) -> dict[str, Any]:
    """The request as the response repeats it, with what is really done where that differs."""
    reasoning, text = fields.reasoning, fields.text
    return {
        "instructions": fields.instructions,
        "metadata": fields.metadata or {},
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "tool_choice": fields.tool_choice if fields.tool_choice is not None else "auto",
        "tools": fields.tools or [],
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": None,
        },
        "text": {"format": (text.format if text is not None else None) or {"type": "text"}},
        "top_logprobs": fields.top_logprobs or 0,
        "user": fields.user,
        "background": bool(fields.background),
        "conversation": {"id": said.conversation_id} if said.conversation_id else None,
        "previous_response_id": fields.previous_response_id,
        "service_tier": "default",
        "store": said.is_stored,
        "truncation": "disabled",
    }
