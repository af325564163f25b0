"""ChatSession: a conversation with one model, kept in memory; no terminal in here.

`ask` streams an answer and records it, so the next prompt starts with all that was said and the
prefix cache serves it. An answer that was cut short is kept as far as it came. The prompts and
commands are in `chat.py`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from quire.errors import BadRequest
from quire.llm import LLM
from quire.params import SamplingParams

SETTABLE = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class TurnStats:
    """Of one answer; times in seconds."""

    num_tokens: int
    ttft: float | None
    tokens_per_s: float | None  # after the first token
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str | None

    def describe(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        if self.ttft is not None:
            parts.append(f"first token {self.ttft * 1000:.0f} ms")
        parts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens cached")
        if self.finish_reason not in (None, "stop"):
            parts.append(f"ended by {self.finish_reason}")
        return " · ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class ChatSession:
    llm: LLM
    params: SamplingParams
    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    last: TurnStats | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def reset(self) -> None:
        self.turns.clear()
        self.last = None

    def set(self, name: str, value: str) -> None:
        """Change one sampling parameter; raises BadRequest naming the known ones."""
        if name not in SETTABLE:
            raise BadRequest(f"cannot set {name!r}; known: {', '.join(SETTABLE)}")
        is_whole = name in ("top_k", "max_tokens", "seed")
        try:
            number = int(value) if is_whole else float(value)
        except ValueError:
            raise BadRequest(f"got {name}={value!r}, want a number") from None
        self.params = self.params.with_(**{name: number})

    def ask(self, text: str, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Pieces of the answer. Afterwards `last` tells how it went."""
        self.turns.append({"role": "user", "content": text})
        before, start, first = self.llm.stats(), time.perf_counter(), None
        pieces: list[str] = []
        num_tokens, finish = 0, None
        try:
            stream = self.llm.stream_chat(self.messages, self.params)
            for event in stream:
                now = time.perf_counter()
                first = now if first is None else first
                num_tokens += len(event.token_ids)
                finish = event.finish_reason
                pieces.append(event.text)
                yield event.text
                if is_stopped():
                    stream.close()  # type: ignore[attr-defined]  # a generator: this aborts
                    finish = finish or "abort"
                    break
        finally:
            if first is None:
                self.turns.pop()  # it never started: as if it had not been asked
            else:
                self.turns.append({"role": "assistant", "content": "".join(pieces)})
        after, end = self.llm.stats(), time.perf_counter()
        speed = (num_tokens - 1) / (end - first) if first is not None and num_tokens > 1 else None
        self.last = TurnStats(
            num_tokens,
            None if first is None else first - start,
            speed,
            after.prefix_query_tokens - before.prefix_query_tokens,
            after.prefix_hit_tokens - before.prefix_hit_tokens,
            finish,
        )


@contextmanager
def stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yields whether Ctrl-C was pressed. The first press asks, the second one interrupts.

    A flag and not an exception, so that the engine is never left in the middle of a step.
    """
    pressed = False

    def press(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
