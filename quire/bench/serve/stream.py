"""StreamReading: the bytes of one HTTP answer become events with the time they came. No I/O here.

It understands as much of HTTP/1.1 as servers of models send (a length, chunks, or an end by
closing) and of server-sent events as OpenAI's streams use. A piece of text is counted when its
event is complete; events that came in one read carry one time. `client.py` reads the socket.
"""

from __future__ import annotations

import json
from typing import Any

TOO_LONG = 1 << 20  # of a head, or of an event


class BadAnswer(Exception):
    """The other side does not speak HTTP or JSON; the text says what was seen."""


class StreamReading:
    def __init__(self) -> None:
        self.status = 0
        self.token_times: list[float] = []  # when each piece of text came
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.finish: str | None = None
        self.error: str | None = None  # that the stream told of
        self.is_complete = False  # as the protocol says, whatever the content
        self.body = bytearray()  # of an answer that is no stream
        self._raw, self._events = bytearray(), bytearray()
        self._is_chunked = self._is_stream = False
        self._left: int | None = None  # bytes of the body to come; None: until it closes
        self._in_chunk: int | None = None

    # ------------------------------------------------------------ http

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that came at `now`. Raises BadAnswer."""
        self._raw += data
        if not self.status and not self._take_head():
            return
        if self._is_chunked:
            self._take_chunks(now)
            return
        part = bytes(self._raw)
        self._raw.clear()
        self._take_body(part, now)
        if self._left is not None:
            self._left -= len(part)
            self.is_complete = self._left <= 0

    def closed(self) -> None:
        """The other side closed: the end of an answer that has neither length nor chunks."""
        if self.status and not self._is_chunked and self._left is None:
            self.is_complete = True

    def _take_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > TOO_LONG or not b"HTTP/1.".startswith(bytes(self._raw[:7])):
                raise BadAnswer(f"no HTTP/1 answer: {bytes(self._raw[:60])!r}")
            return False
        first, *lines = bytes(self._raw[:end]).split(b"\r\n")
        del self._raw[: end + 4]
        words = first.split(b" ", 2)
        if len(words) < 2 or not first.startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BadAnswer(f"no HTTP/1 answer: {first[:60]!r}")
        pairs = (line.partition(b":")[::2] for line in lines)
        fields = {name.strip().lower(): value.strip().lower() for name, value in pairs}
        self.status = int(words[1])
        self._is_chunked = b"chunked" in fields.get(b"transfer-encoding", b"")
        self._is_stream = b"text/event-stream" in fields.get(b"content-type", b"")
        length = fields.get(b"content-length")
        if length is not None and length.isdigit() and not self._is_chunked:
            self._left = int(length)
            self.is_complete = self._left == 0
        return True

    def _take_chunks(self, now: float) -> None:
        raw = self._raw
        while True:
            if self._in_chunk is None:
                end = raw.find(b"\r\n")
                if end < 0:
                    return
                try:
                    self._in_chunk = int(bytes(raw[:end]).split(b";")[0], 16)
                except ValueError:
                    raise BadAnswer(f"no chunk: {bytes(raw[:40])!r}") from None
                del raw[: end + 2]
            if self._in_chunk == 0:
                self.is_complete = True
                return
            if len(raw) < self._in_chunk + 2:
                return
            self._take_body(bytes(raw[: self._in_chunk]), now)
            del raw[: self._in_chunk + 2]
            self._in_chunk = None

    # ------------------------------------------------------------ events

    def _take_body(self, data: bytes, now: float) -> None:
        if not self._is_stream:
            self.body += data
            return
        self._events += data.replace(b"\r", b"")
        *events, rest = bytes(self._events).split(b"\n\n")
        self._events[:] = rest
        for event in events:
            lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
            text = b"\n".join(line[5:].strip() for line in lines)
            if text and text != b"[DONE]":
                self._take_event(text, now)

    def _take_event(self, text: bytes, now: float) -> None:
        try:
            event = json.loads(text)
        except ValueError:
            raise BadAnswer(f"an event that is no JSON: {text[:60]!r}") from None
        if not isinstance(event, dict):
            raise BadAnswer(f"an event that is no object: {text[:60]!r}")
        if event.get("error"):
            self.error = _message(event["error"])
        for choice in event.get("choices") or ():
            if _has_text(choice):
                self.token_times.append(now)
            self.finish = choice.get("finish_reason") or self.finish
        if usage := event.get("usage"):
            self.num_prompt_tokens = usage.get("prompt_tokens")
            self.num_output_tokens = usage.get("completion_tokens")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    names = ("text", "content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(name) for name in names)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
