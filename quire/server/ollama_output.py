"""Ollama's answers: lines of JSON, of which the last one says why it ended and how long it took.

Pure values from segments; nothing here waits or talks to the engine. Ollama sends a call whole and
its clients run whatever call they get, so one that the output broke off in is left out; then
`done_reason` is "length".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from quire.server import sse
from quire.server.generation import Generation
from quire.server.problems import Problem
from quire.server.segments import Change, Closed, Grew, Kind, Segment, Segments

NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000


class Said(NamedTuple):
    """What a line, or the whole answer, says."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[Segment] = ()


Put = Callable[[Said], dict[str, Any]]


def as_message(said: Said) -> dict[str, Any]:
    """Where `/api/chat` puts it."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.thinking:
        message["thinking"] = said.thinking
    if said.calls:
        message["tool_calls"] = [_call(segment) for segment in said.calls]
    return {"message": message}


def as_response(said: Said) -> dict[str, Any]:
    """Where `/api/generate` puts it."""
    thinking = {"thinking": said.thinking} if said.thinking else {}
    return {"response": said.content, **thinking}


def _call(segment: Segment) -> dict[str, Any]:
    # As the model wrote them: parsers vouch for the JSON, and reading it would only lose digits.
    arguments = msgspec.Raw(segment.text.encode() or b"{}")
    return {"id": segment.call_id, "function": {"name": segment.name, "arguments": arguments}}


def said_by(change: Change) -> Said | None:
    """What a client hears of a change; None: nothing yet."""
    segment = change.segment
    if isinstance(change, Grew) and segment.kind is Kind.TEXT:
        return Said(content=change.delta)
    if isinstance(change, Grew) and segment.kind is Kind.REASONING:
        return Said(thinking=change.delta)
    if isinstance(change, Closed) and _is_whole_call(segment):
        return Said(calls=[segment])
    return None


def said_in_all(segments: Segments) -> Said:
    def joined(kind: Kind) -> str:
        return "".join(segment.text for segment in segments.all if segment.kind is kind)

    calls = [segment for segment in segments.all if _is_whole_call(segment)]
    return Said(joined(Kind.TEXT), joined(Kind.REASONING), calls)


def _is_whole_call(segment: Segment) -> bool:
    return segment.kind is Kind.CALL and not segment.is_cut


class AnswerShape:
    """The lines of one answer."""

    def __init__(self, model: str, put: Put) -> None:
        self._model, self._put = model, put

    def news(self, said: Said) -> dict[str, Any]:
        return self._head() | self._put(said) | {"done": False}

    def last(self, said: Said, reason: str, **rest: Any) -> dict[str, Any]:
        return self._head() | self._put(said) | {"done": True, "done_reason": reason, **rest}

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": rfc3339(datetime.now(UTC))}


def line(value: dict[str, Any]) -> bytes:
    return sse.encode(value) + b"\n"


def failure(problem: Problem) -> bytes:
    """The last line of a stream that broke off."""
    return problem.body("ollama") + b"\n"


def done_reason(segments: Segments) -> str:
    return "length" if segments.finish == "length" else "stop"


def durations(generation: Generation) -> dict[str, int]:
    """Nanoseconds and tokens. Nothing is loaded for a request; clients divide by the others."""
    timings = generation.timings()
    return {
        "total_duration": since(generation.http.begun),
        "load_duration": 0,
        "prompt_eval_count": generation.num_prompt,
        "prompt_eval_duration": max(1, round(timings["prefill_ms"] * NS_PER_MS)),
        "eval_count": generation.num_output,
        "eval_duration": max(1, round(timings["decode_ms"] * NS_PER_MS)),
    }


def since(begun: float) -> int:
    """Nanoseconds from a monotonic time to now."""
    return round((time.monotonic() - begun) * NS_PER_S)


def rfc3339(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
