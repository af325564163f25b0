"""A model that answers with texts that are known beforehand: steps and drafts can be counted.

The scheduler, the engine's loop and the policy of drafts are the real ones; only the runner is
played. Time is what the policy is told that steps take, so every number is the same on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.request import Request
from quire.sched.costs import StepCosts
from quire.spec.depth import Costs
from quire.spec.proposer import Proposer
from quire.spec.speculation import Limits, Speculation
from quire.spec.verify import verified
from quire.step import StepPlan, StepResult
from tests.unit.case import Case, Ready

# Milliseconds of steps of so many tokens of the default model on one thread of a CPU, measured.
CPU = Costs(
    StepCosts.of([(1, 3.7), (2, 4.2), (3, 4.7), (4, 5.3), (5, 5.8), (6, 6.1), (8, 7.5), (64, 37.8)])
)


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: Sequence[int]
    answer: Sequence[int]
    hint: Sequence[int] = ()


class Played(Case):
    """Counts steps behind the prompts, and adds up what they take."""

    def __init__(
        self,
        proposer: Proposer | None,
        depth: int,
        costs: Costs = CPU,
        model: Proposer | None = None,
    ) -> None:
        super().__init__(
            num_pages=1 << 13,
            page_size=16,
            max_model_len=1 << 12,
            max_num_seqs=256,
            max_num_batched_tokens=1 << 14,
            caching=False,
        )
        if proposer is not None:
            self.core.drafts = Speculation(proposer, Limits(depth), costs, model=model)
        self.costs, self.time, self.num_steps = costs, 0.0, 0
        self.num_right = 0  # of a model's drafts in each step, from the first on
        self._texts: dict[int, list[int]] = {}
        self._rows: dict[int, list[int]] = {}

    def ask(self, asked: Asked) -> Request:
        request = self.request(asked.prompt, len(asked.answer), ignore_eos=True)
        request.hint = tuple(asked.hint)
        self._texts[request.id] = [*asked.prompt, *asked.answer]
        self.core.add(request)
        return request

    def execute(self, plan: StepPlan) -> Ready:
        for admission in plan.admissions:
            self._rows[admission.row] = self._texts[admission.request_id]
        if plan.works and all(work.start for work in plan.works):
            self.num_steps += 1
            self.time += self.costs.step.seconds(plan.num_tokens)
        samples = []
        for work in plan.works:
            end = work.start + work.num_tokens
            drawn = self._rows[work.row][end - work.num_drafts : end + 1]
            if work.drafts:
                drawn = list(verified(drawn, work.drafts))
            elif work.num_drafts:
                drawn = drawn[: 1 + self.num_right]
            samples.append(tuple(drawn) if work.sample else ())
        return Ready(StepResult(samples))


def played(proposer: Proposer | None, depth: int, asked: Asked) -> Played:
    """One request from its prompt to its end."""
    case = Played(proposer, depth)
    request = case.ask(asked)
    case.run()
    assert request.output == list(asked.answer)
    return case
