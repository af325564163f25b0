"""SampleInputs and SampleOutput: what crosses between the runner and the sampler.

Everything is a device tensor except the flags, which the host knows from the step plan and uses
to leave out work nobody asked for. S is the number of sampled sequences in the step, V the
vocabulary. Position is the absolute position of the token being drawn, so that a draw depends on
(seed, position) alone and never on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class History:
    """Tokens seen so far, for penalties and bad words."""

    tokens: Tensor  # [S, L] int64 token ids, prompt then output; columns >= lens are junk
    prompt_lens: Tensor  # [S] int64
    lens: Tensor  # [S] int64 prompt + output so far


@dataclass(frozen=True, slots=True)
class Penalties:
    repetition: (
        Tensor  # [S] f32, 1 = off; divides positive and multiplies negative logits of seen tokens
    )
    presence: Tensor  # [S] f32, 0 = off; counts output tokens only
    frequency: Tensor  # [S] f32, 0 = off; counts output tokens only


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """Sparse edits to logits as parallel lists of (sample row, token) pairs."""

    bias_rows: Tensor  # [nb] int64
    bias_tokens: Tensor  # [nb] int64
    bias_values: Tensor  # [nb] f32
    banned_rows: Tensor  # [nx] int64: min_tokens (eos and stop ids)
    banned_tokens: Tensor  # [nx] int64
    # allowed_token_ids: rows listed here lose every token but the listed ones
    allowed_rows: Tensor  # [na] int64, one entry for each allowed token
    allowed_tokens: Tensor  # [na] int64


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not be completed, right-aligned and padded with -1 on the left."""

    rows: Tensor  # [nw] int64 sample row of each sequence
    prefixes: Tensor  # [nw, P] int64: all but the last token
    last: Tensor  # [nw] int64: banned when the prefix matches the end of the row's history


@dataclass(frozen=True, slots=True)
class TokenMask:
    """For the rows listed here: which tokens may be drawn, one bit each, lowest bit first."""

    rows: Tensor  # [M] int64 sample rows
    bits: Tensor  # [M, ceil(V / 32)] int32


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Samples as rows of lasting tables, so nothing is gathered before the draw or stored after."""

    ids: Tensor  # [S] int32
    tokens: Tensor  # [N, L] int32; the sampler writes token i to [ids[i], positions[i]]


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """The first five are [N] columns when there are `rows`: sample i's entry is at rows.ids[i]."""

    temperature: Tensor  # [S] f32; < GREEDY_BELOW means argmax
    top_k: Tensor  # [S] int64; <= 0 means off
    top_p: Tensor  # [S] f32; 1 means off
    min_p: Tensor  # [S] f32; 0 means off
    seeds: Tensor  # [S] int64
    positions: Tensor  # [S] int32 or int64
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    num_logprobs: int | None  # most logprobs any row wants; None: nobody wants any
    history: History | None = None
    penalties: Penalties | None = None
    edits: TokenEdits | None = None
    bad_words: BadWords | None = None
    mask: TokenMask | None = None
    rows: SampleRows | None = None

    def by_sample(self) -> SampleInputs:
        """The same settings, with one entry for each sample."""
        if self.rows is None:
            return self
        ids = self.rows.ids
        return replace(
            self,
            temperature=self.temperature[ids],
            top_k=self.top_k[ids],
            top_p=self.top_p[ids],
            min_p=self.min_p[ids],
            seeds=self.seeds[ids],
            rows=None,
        )


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities of the unmodified distribution (before penalties and temperature)."""

    chosen: Tensor  # [S] f32
    chosen_rank: Tensor  # [S] int64, 1 = most likely
    top_tokens: Tensor  # [S, K] int64
    top_values: Tensor  # [S, K] f32


@dataclass(frozen=True, slots=True)
class SampleOutput:
    tokens: Tensor  # [S] int64
    logprobs: SampledLogprobs | None
