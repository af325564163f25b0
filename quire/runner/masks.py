"""GrammarMasks: which tokens a step may draw, for requests with a grammar.

With overlap a step is launched before the host has seen the tokens of the previous step. The
forward does not need them, but the masks do. So masks are made after the forward was launched: wait
for the last step's tokens (the device is already busy with this forward), advance the matchers,
fill the bits, send them. When a matcher fails, its row stays unmasked, the token is dropped and the
request ends with the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.grammar.live import LiveMatchers
from quire.grammar.matcher import GrammarError, Matcher, Words, num_words
from quire.grammar.spec import NOTHING_LEFT
from quire.request import RequestId
from quire.runner.gather import StepShape
from quire.runner.rows import GRAMMAR, RequestRows, RowInfo
from quire.runner.upload import IntArray, Uploader
from quire.sample.inputs import TokenMask
from quire.step import Admission, Work

if TYPE_CHECKING:
    from quire.runner.pending import PendingStep


@dataclass(slots=True)
class StepMask:
    """One step's masks on the host, kept to judge what was drawn."""

    ids: list[RequestId]
    places: list[int]  # of each mask among the samples
    works: list[int]  # and of its work among all works
    bits: Words  # [masks, words]
    failed: dict[int, str] = field(default_factory=dict)  # place -> why

    def failures(self, tokens: Sequence[int]) -> dict[int, str]:
        """Place -> why it failed, including samples that had to be a token their mask forbids."""
        failed = dict(self.failed)
        for place, bits in zip(self.places, self.bits, strict=True):
            token = tokens[place]
            if place not in failed and not bits[token >> 5] >> (token & 31) & 1:
                failed[place] = NOTHING_LEFT
        return failed


class GrammarMasks:
    def __init__(self, matchers: LiveMatchers, vocab_size: int, uploader: Uploader) -> None:
        self.matchers, self.vocab_size, self.uploader = matchers, vocab_size, uploader
        # Who has drawn tokens that the matcher has not seen: in which step, by which work.
        self._unseen: dict[RequestId, tuple[PendingStep, int]] = {}

    def admit(self, admissions: Iterable[Admission]) -> None:
        """Start matchers, or bring back those of preempted requests to where their output ends."""
        for admission in admissions:
            if admission.params.structured_outputs is None:
                continue
            # A token in flight when the request was preempted will be drawn again.
            self._unseen.pop(admission.request_id, None)
            matcher = self.matchers.get(admission.request_id)
            if matcher is not None:
                with suppress(GrammarError):  # it says so again when a mask is wanted
                    matcher.restart(admission.tokens[admission.num_prompt :])

    def make(
        self, rows: RequestRows, works: Sequence[Work], shape: StepShape
    ) -> tuple[TokenMask, StepMask]:
        """Masks for the sampled works that have a grammar; waits for the last step's tokens."""
        self.catch_up()
        places = np.flatnonzero(rows.needs[shape.rows[shape.sampled]] & GRAMMAR).tolist()
        chosen = shape.sampled[places].tolist()
        device = self.uploader.device
        host = torch.empty(
            (len(places), num_words(self.vocab_size)),
            dtype=torch.int32,
            pin_memory=device.type == "cuda",
        )
        ids = [works[i].request_id for i in chosen]
        step = StepMask(ids, places, chosen, host.numpy())
        first = 0
        for index, count in zip(*np.unique(chosen, return_counts=True), strict=True):
            masks = slice(first, first + count)
            lens = shape.sample_lens[places[masks]]
            fill = self._fill_tree if works[index].parents else self._fill_run
            fill(step, masks, rows, works[index], lens)
            first += count
        on_device = host.to(device, non_blocking=True)
        return TokenMask(self.uploader.send_one(torch.tensor(places)), on_device), step

    def _fill_run(
        self, step: StepMask, masks: slice, rows: RequestRows, work: Work, lens: IntArray
    ) -> None:
        """The masks of one work: after its newest token, and after each of its drafts."""
        info = rows.info[work.row]
        assert info is not None
        drafts: Sequence[int] = work.drafts
        if work.num_drafts and not drafts:  # a drafter made them; a GPU is waited for
            drafts = rows.tokens[work.row, lens[0] : lens[-1]].tolist()
        matcher = self.matchers.get(work.request_id)
        if matcher is not None and drafts:
            matcher = matcher.fork()
        step.bits[masks] = -1  # where nothing is filled in, whatever is drawn will be dropped
        for offset, bits in enumerate(step.bits[masks]):
            error = _filled(bits, matcher, info, int(lens[offset]), work.request_id)
            if error is not None:
                step.failed[step.places[masks.start + offset]] = error
                return
            if offset < len(drafts):
                assert matcher is not None
                draft = drafts[offset]
                if not bits[draft >> 5] >> (draft & 31) & 1:
                    return  # it cannot be drawn, so nothing behind it counts
                with suppress(GrammarError):  # the next mask says so
                    matcher.accept(draft)

    def _fill_tree(
        self, step: StepMask, masks: slice, rows: RequestRows, work: Work, lens: IntArray
    ) -> None:
        """The same where drafts are a tree: each goes on from where its parent's matcher is."""
        info, root = rows.info[work.row], self.matchers.get(work.request_id)
        assert info is not None
        drafts = rows.tokens[work.row, work.start + 1 : work.start + work.num_tokens].tolist()
        step.bits[masks] = -1
        matchers: list[Matcher | None] = []  # None: nothing behind this node counts
        for node, bits in enumerate(step.bits[masks]):
            matcher = root
            if node:
                parent = work.parents[node - 1]
                matcher = _behind(matchers[parent], step.bits[masks][parent], drafts[node - 1])
            matchers.append(matcher)
            if node and matcher is None:
                continue
            error = _filled(bits, matcher, info, int(lens[node]), work.request_id)
            if error is not None:
                step.failed[step.places[masks.start + node]] = error
                matchers[node] = None

    def remember(self, step: StepMask, pending: PendingStep) -> None:
        """The step was launched: its tokens are what the matchers must see next."""
        for request_id, work in zip(step.ids, step.works, strict=True):
            self._unseen[request_id] = (pending, work)

    def has_any(self) -> bool:
        return len(self.matchers) > 0

    def forced(self, request_id: RequestId) -> Sequence[int]:
        """Tokens that must come next; waits for what the request drew last."""
        if (unseen := self._unseen.pop(request_id, None)) is not None:
            self._show(request_id, *unseen)
        return self.forced_so_far(request_id)

    def forced_so_far(self, request_id: RequestId) -> Sequence[int]:
        """The same behind the tokens that the matcher has seen; waits for nothing."""
        matcher = self.matchers.get(request_id)
        return () if matcher is None else matcher.forced()

    def catch_up(self) -> None:
        """Let the matchers see what was drawn; waits for it."""
        for request_id, (pending, work) in self._unseen.items():
            self._show(request_id, pending, work)
        self._unseen.clear()

    def _show(self, request_id: RequestId, pending: PendingStep, work: int) -> None:
        matcher = self.matchers.get(request_id)
        if matcher is None:
            return  # ended meanwhile
        with suppress(GrammarError):  # as above
            for token in pending.kept(work):
                matcher.accept(token)


def _behind(matcher: Matcher | None, bits: Words, draft: int) -> Matcher | None:
    """A fork that has seen the draft; None where it cannot be drawn."""
    if matcher is None or not bits[draft >> 5] >> (draft & 31) & 1:
        return None
    made = matcher.fork()
    with suppress(GrammarError):  # the next mask says so
        made.accept(draft)
    return made


def _filled(
    bits: Words, matcher: Matcher | None, info: RowInfo, length: int, request_id: RequestId
) -> str | None:
    """Fill the mask behind so many tokens. Else why not, and everything is allowed."""
    try:
        if matcher is None:
            raise GrammarError(f"request {request_id} came without a compiled grammar")
        matcher.fill(bits)
        _narrow(bits, info, length - info.num_prompt)
    except GrammarError as error:
        bits[:] = -1
        return str(error)
    return None


def _narrow(bits: Words, info: RowInfo, num_output: int) -> None:
    """Fold in all other hard bans, so that a row with no token left is known before the draw."""
    allowed = info.params.allowed_token_ids
    is_early = num_output < info.params.min_tokens
    if allowed is not None:
        bits &= _bits_of(allowed, len(bits))
    if is_early:
        bits &= ~_bits_of(info.banned_until_min, len(bits))
    if (is_early or allowed is not None) and not bits.any():
        raise GrammarError(NOTHING_LEFT)


def _bits_of(tokens: Iterable[int], num_words: int) -> Words:
    ids = np.fromiter(tokens, np.int64)
    bits = np.zeros(num_words, np.uint32)
    np.bitwise_or.at(bits, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return bits.view(np.int32)
