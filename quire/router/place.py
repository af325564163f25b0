"""Place: a request's room at an upstream, from the choice to the end of the answer.

What the router remembers when a request goes somewhere, when its first byte comes and when it
leaves, by which `choose.py` decides about the next. Values in and values out, in whoever's time:
the live router (`proxy.py`) and a simulated one run the same lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.router.choose import Prompt
from quire.router.upstream import Upstream


@dataclass(slots=True)
class Place:
    upstream: Upstream
    num_tokens: int  # to be computed there, as far as is known
    begun: float
    pending_before: int  # tokens, of this request too
    open_before: int
    _pending: int

    @staticmethod
    def take(upstream: Upstream, prompt: Prompt, now: float) -> Place:
        """The request is on its way there; its pages are promised."""
        num_tokens = prompt.uncached(upstream, now)
        upstream.num_open += 1
        upstream.num_sent += 1
        upstream.pending_tokens += num_tokens
        upstream.prompt_tokens += prompt.num_tokens
        upstream.hit_tokens += prompt.num_tokens - num_tokens
        upstream.index.promise(prompt.keys, now)
        before = upstream.pending_tokens, upstream.num_open
        return Place(upstream, num_tokens, now, *before, num_tokens)

    def first_byte(self, now: float, is_stream: bool) -> None:
        """A whole answer teaches nothing of first tokens: its time is mostly decoding."""
        if self._pending and is_stream:
            took = now - self.begun
            self.upstream.times.saw(self.pending_before, self.open_before, took)
        self._computed()

    def leave(self) -> None:
        """Once, whatever became of the request."""
        self._computed()
        self.upstream.num_open -= 1

    def _computed(self) -> None:
        self.upstream.pending_tokens -= self._pending
        self._pending = 0
