"""Logprobs of prompt tokens, for the rows that want them and the positions fed in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quire.request import RequestId
from quire.runner.gather import StepShape
from quire.runner.pending import PromptPart
from quire.runner.rows import PROMPT_LOGPROBS, RequestRows
from quire.sample.inputs import SampledLogprobs
from quire.sample.logprobs import prompt_logprobs
from quire.step import Work

if TYPE_CHECKING:
    from quire.sample.logprobs import BestOf

# Whose prompt, its first position here, hidden states [positions, hidden] (good until the next
# step) and the tokens that follow them [positions].
PromptReader = Callable[[RequestId, int, Tensor, Tensor], None]
# Hidden states [positions, hidden], the tokens that follow them, and how many logprobs of each.
PromptScore = Callable[[Tensor, Tensor, int], SampledLogprobs]

CHUNK = 256  # positions whose logits exist at once


def prompt_score(head: Callable[[Tensor], Tensor], best: BestOf) -> PromptScore:
    """`head`: from hidden states to logits."""
    return lambda states, targets, num: prompt_logprobs(states, targets, head, num, CHUNK, best)


def prompt_parts(
    works: Sequence[Work],
    shape: StepShape,
    rows: RequestRows,
    hidden: Tensor,
    score: PromptScore,
    reader: PromptReader | None,
) -> list[PromptPart]:
    """`reader` takes the place of logprobs. `hidden` is of all tokens."""
    parts = []
    for work in np.flatnonzero(rows.needs[shape.rows] & PROMPT_LOGPROBS).tolist():
        row, start = int(shape.rows[work]), int(shape.starts[work])
        info = rows.info[row]
        assert info is not None and info.params.prompt_logprobs is not None
        stop = min(int(shape.context_lens[work]), info.num_prompt - 1)
        if start >= stop:
            continue
        first = int(shape.query_ends[work] - shape.query_lens[work])
        targets = rows.tokens[row, start + 1 : stop + 1].long()
        states = hidden[first : first + stop - start]
        if reader is not None:
            reader(works[work].request_id, start, states, targets)
            continue
        num = info.params.prompt_logprobs
        parts.append(PromptPart(work, num, targets, score(states, targets, num)))
    return parts
