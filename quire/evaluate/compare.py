"""What a model says of each token, and how far that is from what a reference says.

The divergence needs both models' probabilities of the whole vocabulary at the same positions. The
reference runs first, alone. Of it only the hidden states after the last norm are kept, a few KB a
token in a file, and its output head: what the head makes of a state does not depend on the batch,
so the same logits can be had again, a few positions at a time, while another model runs.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.errors import BadRequest
from quire.evaluate.score import log_softmax, output_of, pieces, read_prompts
from quire.evaluate.stats import Floats
from quire.evaluate.texts import Windows
from quire.llm import LLM


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Each [windows, scored tokens]."""

    logprobs: Floats  # of the text's own tokens
    divergence: Floats | None = None  # KL(reference || model) in nats
    agrees: Floats | None = None  # 1.0 where both think the same token likeliest


class Reference:
    """A model that others are compared with, reduced to what the comparison reads."""

    def __init__(self, llm: LLM, windows: Windows) -> None:
        spec, self._model = llm._engine.spec, output_of(llm)
        self.windows, self.vocab_size = windows, spec.vocab_size
        shape = (len(windows.ids), windows.length - 1, spec.hidden_size)
        with tempfile.TemporaryFile(prefix="quire-states-") as file:  # gone with the mapping
            self._states = np.memmap(file, np.float32, "w+", shape=shape)

    def keep(self, window: int, start: int, hidden: Tensor) -> None:
        """fp32 holds what fp16 and bf16 hold."""
        self._states[window, start : start + len(hidden)] = hidden.float().cpu().numpy()

    def release_layers(self) -> None:
        """All have been kept: from here on the head is enough."""
        head = copy.copy(self._model)
        head.blocks = []
        if not head.spec.tied:
            del head.embed
        self._model = head

    def log_softmax(self, window: int, start: int, count: int) -> Tensor:
        states = torch.from_numpy(self._states[window, start : start + count].copy())
        states = states.to(self._model.device, self._model.dtype)
        return log_softmax(self._model.logits(states))

    def check(self, windows: Windows, vocab_size: int) -> None:
        """Raises BadRequest: divergences are between probabilities of the same tokens."""
        if vocab_size != self.vocab_size or windows.ids != self.windows.ids:
            raise BadRequest(
                f"the vocabularies differ ({vocab_size} and {self.vocab_size} tokens, or other ids"
                " for the same text), so there is no divergence between the two models; compare"
                " bits per byte of each alone, without --against"
            )


def score_windows(
    llm: LLM, windows: Windows, reference: Reference | None = None, keep: Reference | None = None
) -> TokenScores:
    """Compared with the `reference`; or to `keep` its states as one."""
    model = output_of(llm)
    shape = (len(windows.ids), windows.length - 1)
    made = TokenScores(np.zeros(shape))
    if reference is not None:
        reference.check(windows, model.spec.vocab_size)
        made = TokenScores(np.zeros(shape), np.zeros(shape), np.zeros(shape))

    def read(window: int, start: int, hidden: Tensor, targets: Tensor) -> None:
        if keep is not None:
            keep.keep(window, start, hidden)
        for part in pieces(len(hidden), model.spec.vocab_size):
            logits, wanted = model.logits(hidden[part]), targets[part]
            ours = log_softmax(logits)  # [positions, vocabulary] fp64
            at = (window, slice(start + part.start, start + part.start + len(wanted)))
            made.logprobs[at] = ours.gather(1, wanted[:, None]).squeeze(1).cpu().numpy()
            if reference is None:
                continue
            assert made.divergence is not None and made.agrees is not None
            theirs = reference.log_softmax(window, start + part.start, len(wanted))
            made.divergence[at] = divergence(theirs, ours).cpu().numpy()
            made.agrees[at] = (theirs.argmax(1) == ours.argmax(1)).double().cpu().numpy()

    read_prompts(llm, windows.ids, read, "Scoring text")
    return made


def divergence(theirs: Tensor, ours: Tensor) -> Tensor:
    """KL(theirs || ours) of log-probabilities [positions, vocabulary]; at least 0.

    >>> divergence(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log())
    tensor([0.1438])
    """
    chances = theirs.exp()
    # What the reference holds impossible adds nothing, whatever the model says of it.
    terms = torch.where(chances > 0, chances * (theirs - ours), 0.0)
    return terms.sum(1).clamp_(min=0.0)
