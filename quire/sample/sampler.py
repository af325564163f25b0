"""Sampler: logits of a step to one token for each row, in the order vLLM applies things.

Log-probabilities of the raw logits come first; then allowed tokens, bad words, bans, biases,
penalties and grammar masks; then argmax for greedy rows, and temperature, min_p, top_k, top_p and
the seeded draw for the others. How a device draws is its table's to say (`ops.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire.sample.cpu_ops import CpuSampling
from quire.sample.inputs import SampleOutput
from quire.sample.logprobs import gather_logprobs, log_softmax
from quire.sample.penalties import (
    apply_allowed,
    apply_bad_words,
    apply_bans_and_biases,
    apply_penalties,
)

if TYPE_CHECKING:
    from torch import Tensor

    from quire.sample.inputs import SampleInputs
    from quire.sample.ops import SampleOps


class Sampler:
    """Draws tokens; a call depends on its arguments alone.

    NaN logits count as banned (-inf), +inf as the largest float; a row with nothing left yields
    token 0. On a GPU no call waits for the device.
    """

    def __init__(self, ops: SampleOps | None = None) -> None:
        """`ops`: those of the device that logits are on; None: a CPU's."""
        self.ops: SampleOps = ops or CpuSampling()

    @torch.inference_mode()
    def __call__(self, logits: Tensor, inputs: SampleInputs) -> SampleOutput:
        """[S, V] any float -> [S] tokens, stored in the rows too. May write into `logits`."""
        num = inputs.num_logprobs
        logprobs = None if num is None else log_softmax(logits)
        logits = self.edited(logits, inputs)
        tokens = self.ops.draw(logits, inputs)
        if logprobs is None or num is None:
            return SampleOutput(tokens, None)
        return SampleOutput(tokens, gather_logprobs(logprobs, tokens, num, self.ops.best))

    def edited(self, logits: Tensor, inputs: SampleInputs) -> Tensor:
        """Logits after all that requests ask of them; may write into `logits`."""
        logits = _edit(logits, inputs)
        if inputs.mask is not None:
            self.ops.ban(logits, inputs.mask)
        return logits


def _edit(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """Logits after everything that can change the argmax; the argument itself when nothing does."""
    history, penalties = inputs.history, inputs.penalties
    if inputs.edits is None and inputs.bad_words is None and penalties is None:
        return logits
    logits = logits.float().contiguous()
    if inputs.edits is not None:
        apply_allowed(logits, inputs.edits)
    if inputs.bad_words is not None:
        apply_bad_words(logits, inputs.bad_words, history)
    if inputs.edits is not None:
        apply_bans_and_biases(logits, inputs.edits)
    if penalties is not None:
        assert history is not None, "penalties need the history"
        apply_penalties(logits, history, penalties)
    return logits
