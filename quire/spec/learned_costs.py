"""LearnedCosts: the costs that drafts are weighed with, corrected by the steps there were.

A size that is wrongly thought to be slow would never be fed, and nobody would notice. So in one
step of 32 sizes not seen lately are taken to be as fast as they can be; a step that promises to
pay by that is fed once, and its time is known. Where none promises to, or drafts are wrong,
trials become rare. Where every step carries drafts, one without is taken along. Steps with prompts
say nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.sched.costs_in_use import MIN_STEPS, CostsInUse
from quire.spec.depth import Costs
from quire.step import StepPlan, Took, Work

EVERY, RARELY = 32, 512  # steps from one trial to the next, at first and at most
WINDOW = 3  # steps that a trial may take: a head first begins to read


class Extra(NamedTuple):
    """What a step took besides feeding its tokens."""

    num_drawn: int = 0  # tokens that were drawn, and not the likeliest taken
    num_accepted: int = 0  # drafts that were right
    drafting_s: float = 0.0  # of a model that drafts, as the host saw it


class LearnedCosts:
    def __init__(self, start: Costs) -> None:
        self.start = self.now = start
        self.sizes = CostsInUse(start.step)
        self._every, self._next = EVERY, EVERY  # of trials; the step that begins the next one

    # ------------------------------------------------------------ before a step

    def is_trial(self, step: int) -> bool:
        """Whether a size that was not seen lately may be tried now."""
        return self._next <= step < self._next + WINDOW and self.sizes.num_steps >= MIN_STEPS

    def for_step(self, step: int, num_decodes: int, depth: int) -> Costs:
        """What to weigh drafts with, of so many requests and of each at most `depth`."""
        if step >= self._next + WINDOW:  # nothing was fed
            self._plan_next(step, was_right=False)
        if not self.is_trial(step):
            return self.now
        below = max(2 * num_decodes, num_decodes + depth)  # a trial must not take long
        hopeful = self.sizes.hopeful(below)
        return self.now if hopeful == self.now.step else replace(self.now, step=hopeful)

    def wants_plain(self, step: int, num_decodes: int) -> bool:
        """Whether a step without drafts is to be seen."""
        return self.is_trial(step) and not self.sizes.is_known(num_decodes)

    # ------------------------------------------------------------ after it

    def learn(self, step: int, plan: StepPlan, took: Took, extra: Extra) -> None:
        """What a step took, the newest of which is `step`."""
        if _is_special(plan) or not (took.was_awaited or self.start.wait):
            return
        if self._next <= step and any(work.num_drafts for work in plan.works):
            self._plan_next(step, extra.num_accepted > 0)
        seconds = took.seconds - self.start.draw * extra.num_drawn
        if not took.was_awaited:
            seconds += self.start.wait
        # Behind a device the host does not see how long a model drafted.
        seconds -= self._drafting(plan.works) if self.start.wait else extra.drafting_s
        self.sizes.learn(plan.num_tokens, seconds)
        if self.sizes.steady is not self.now.step:
            self.now = replace(self.start, step=self.sizes.steady)

    def _plan_next(self, step: int, was_right: bool) -> None:
        self._every = EVERY if was_right else min(2 * self._every, RARELY)
        self._next = step + self._every

    def _drafting(self, works: Sequence[Work]) -> float:
        nums = [work.num_drafts for work in works if work.num_drafts and not work.drafts]
        if not nums or self.start.draft is None:
            return 0.0
        rounds = (sum(num > place for num in nums) for place in range(max(nums)))
        return sum(map(self.start.draft.seconds, rounds))


def _is_special(plan: StepPlan) -> bool:
    """Whether other things than decodes take time in it."""
    others = plan.admissions or plan.page_copies or plan.saves or plan.loads
    return bool(others) or any(
        not work.sample or work.num_tokens != 1 + work.num_drafts for work in plan.works
    )
