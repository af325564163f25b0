"""FinishReport: what is known of a completion when it ends, for metrics, traces and logs."""

from __future__ import annotations

from typing import NamedTuple


class FinishReport(NamedTuple):
    """One completion; a request with n > 1 makes n of these. None: it never got that far."""

    reason: str  # "stop", "length", "abort" or "error"
    prompt_tokens: int
    cached_tokens: int  # of the prompt, taken from the prefix cache
    output_tokens: int
    e2e_s: float  # from arrival to the last token
    queue_s: float | None  # from arrival to its first step
    prefill_s: float | None  # from its first step to its first token
    decode_s: float | None  # from its first token to its last
    num_preempted: int = 0
    is_background: bool = False  # a line of a batch: nobody waited for it
