"""Drafts that do not pay are left alone: no head reads, no result is awaited, little is fed.

Time is counted by the costs that the policy is given: those that an H200 measured
(`docs/benchmarks-h200.md`) and a CPU's. Turns red when a head reads what nobody will draft from, or
never takes up again, when looks do not become rare while they fail, or stay rare when drafts are
right again or fewer requests are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from quire.request import Request
from quire.runner.step_times import padded
from quire.sched.costs import StepCosts
from quire.spec.depth import Costs
from quire.spec.looks import FIRST, LAST, PATIENCE, SILENT, TRIAL, WRONG, Looks
from quire.spec.neural import CHANCE
from quire.spec.proposer import NOTHING, Guess
from quire.spec.speculation import MOST_AHEAD, NEWCOMER, Limits, Speculation
from quire.step import StepPlan, TokenEvent, Work
from tests.doubles import VOCAB, oracle_next
from tests.unit.case import Case, Ready

H200 = StepCosts.of(
    padded([(1, 4.26), (8, 4.55), (64, 4.87), (128, 5.85), (256, 9.0), (512, 14.4)])
)
GPU = Costs(H200, wait=0.46)
# Many rows cost as much as they are: drafts pay for few requests alone.
CPU = Costs(StepCosts.of([(1, 2.1), (2, 2.3), (4, 2.8), (8, 4.6), (32, 17.0), (64, 34.0)]))
HEAD = Costs(CPU.step, StepCosts.of([(1, 0.2), (32, 1.0)]))
DEPTH = 4


class Wrong:
    """A guess for every position, until told otherwise."""

    is_right = False
    has_guess = True

    def propose(self, request: Request, most: int) -> Guess:
        if not self.has_guess:
            return NOTHING
        tokens = request.tokens.tolist()
        for _ in range(most):
            tokens.append((oracle_next(tokens, request.seed) + (not self.is_right)) % VOCAB)
        return Guess((0.8,) * most, tuple(tokens[-most:]))

    def forget(self, request: Request) -> None:
        pass


class Headed:
    """The runner's head makes the guesses: the double's are right by half."""

    def propose(self, request: Request, most: int) -> Guess:
        return Guess((CHANCE,) * most)

    def forget(self, request: Request) -> None:
        pass


class Timed(Case):
    """Counts what its steps take, and who was read."""

    def __init__(self, costs: Costs, proposer: Wrong | Headed, lag: int = 0) -> None:
        super().__init__(
            num_pages=1024,
            page_size=16,
            max_model_len=1024,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
        )
        head = CHANCE if isinstance(proposer, Headed) else 0.0
        self.drafts = Speculation(proposer, Limits(DEPTH, head=head), costs)
        self.core.lag, self.core.drafts = lag, self.drafts
        self.costs, self.time = costs, 0.0
        self.awaited: list[int] = []  # steps whose newest tokens were known, by number
        self.num_decodes = self.num_steps = 0

    def execute(self, plan: StepPlan) -> Ready:
        if plan.works and all(work.start for work in plan.works):
            self.num_steps += 1
            is_awaited = not self.core._inflight
            if is_awaited:
                self.awaited.append(self.num_steps)
            wait = 0.0 if is_awaited else self.costs.wait
            self.time += self.costs.step.seconds(plan.num_tokens) - wait
        return super().execute(plan)

    def step(self) -> list[TokenEvent]:
        return self.core.step()  # pages are checked elsewhere

    def works_of(self, request: Request) -> list[Work]:
        return [work for plan in self.plans for work in plan.works if work.request_id == request.id]


def time_of(proposer: Wrong, num: int, most: int | None, num_tokens: int, costs: Costs) -> float:
    case = Timed(costs, proposer, lag=1)
    for i in range(num):
        case.add([i, 1, 2], num_tokens, num_speculative_tokens=most, ignore_eos=True)
    case.run()
    return case.time


@pytest.mark.parametrize("costs", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("num", [1, 8, 64])
def test_wrong_drafts_cost_three_in_a_hundred_at_most(num: int, costs: Costs) -> None:
    times = {most: time_of(Wrong(), num, most, 128, costs) for most in (0, None)}
    assert times[0] / times[None] >= 0.97
    if num < 64:
        times = {most: time_of(Wrong(), num, most, 512, costs) for most in (0, None)}
        assert times[0] / times[None] >= 0.985


@pytest.mark.parametrize(("num", "times"), [(1, 3.0), (8, 2.5), (64, 1.4)])
def test_right_drafts_pay_as_before(num: int, times: float) -> None:
    right = Wrong()
    right.is_right = True
    plain = time_of(right, num, 0, 128, GPU)
    assert plain / time_of(right, num, None, 128, GPU) > times


def test_waits_for_results_become_rare_and_common_again() -> None:
    proposer = Wrong()
    case = Timed(GPU, proposer, lag=1)
    case.add([1, 2, 3], 1000, ignore_eos=True)
    for _ in range(500):
        case.step()
    assert len(case.awaited) >= PATIENCE, "given up at once"
    assert len(case.awaited) < 30 and case.awaited[-1] < 400
    proposer.is_right = True
    num = len(case.awaited)
    for _ in range(MOST_AHEAD + NEWCOMER):
        case.step()
    assert not case.core.has_work and len(case.awaited) - num > 50


def test_a_newcomer_is_looked_at_before_long() -> None:
    proposer = Wrong()
    case = Timed(GPU, proposer, lag=1)
    case.add([1, 2, 3], 1000, ignore_eos=True)
    for _ in range(400):
        case.step()
    assert case.drafts._waits.every > NEWCOMER
    proposer.is_right = True
    newcomer = case.add([4, 5, 6], 200, ignore_eos=True)
    for _ in range(2 * NEWCOMER):
        case.step()
    assert newcomer.num_accepted > 2 * DEPTH


def test_who_has_nothing_to_say_is_still_asked_often() -> None:
    """On a CPU, where a look costs next to nothing: a text may begin to repeat any time."""
    proposer = Wrong()
    proposer.has_guess, proposer.is_right = False, True
    case = Timed(CPU, proposer)
    request = case.add([1, 2, 3], 400, ignore_eos=True)
    for _ in range(200):
        case.step()
    proposer.has_guess = True
    for _ in range(FIRST + 1):
        case.step()
    assert request.num_accepted > 0


# ------------------------------------------------------------ heads


def follow(case: Timed, steps: int) -> None:
    for _ in range(steps):
        case.step()


def test_a_head_reads_nothing_where_drafts_cannot_pay() -> None:
    case = Timed(HEAD, Headed())
    requests = [case.add([i, 1, 2], 40, ignore_eos=True) for i in range(32)]
    case.run()
    assert not any(work.is_read for request in requests for work in case.works_of(request))
    assert sum(request.num_drafted for request in requests) == 0


def test_a_head_takes_up_again_when_fewer_requests_are_left() -> None:
    case = Timed(HEAD, Headed())
    longest = case.add([1, 2, 3], 300, ignore_eos=True)
    for i in range(31):
        case.add([i, 1, 2], 100, ignore_eos=True)
    follow(case, 95)
    assert len(case.scheduler.running) == 32 and longest.num_drafted == 0
    follow(case, 15)  # the next rare look would be at step 128
    assert len(case.scheduler.running) == 1 and longest.num_accepted > 0
    works = case.works_of(longest)
    assert all(not before.is_read or work.is_read for before, work in pairwise(works))
    assert all(a.is_read for a, b in pairwise(works) if b.num_drafts), "guesses from nothing"


def test_a_head_reads_prompts_that_come_when_there_is_room() -> None:
    case = Timed(HEAD, Headed())
    for i in range(32):
        case.add([i, 1, 2], 20, ignore_eos=True)
    case.run()
    newcomer = case.add(list(range(7)) * 3, 20, ignore_eos=True)
    case.run()
    assert all(work.is_read for work in case.works_of(newcomer)) and newcomer.num_accepted > 0


def test_a_head_that_is_wrong_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """And looks again, each time later than the last."""
    monkeypatch.setattr("tests.doubles.verified", lambda drawn, drafts: drawn[:1])
    case = Timed(HEAD, Headed())
    request = case.add([1, 2, 3], 1000, ignore_eos=True)
    case.run()
    works = case.works_of(request)
    read = [at for at, work in enumerate(works) if work.is_read]
    assert len(works) == 1000 and read[0] == 0
    assert 0 < request.num_drafted < 60 and request.num_accepted == 0
    assert len(read) < 100, "reads for nothing"
    assert max(b - a for a, b in pairwise(read)) >= LAST / 2


def test_a_head_that_is_right_again_is_read_again() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.doubles.verified", lambda drawn, drafts: drawn[:1])
        case = Timed(HEAD, Headed())
        # The double's guesses are right at every second position.
        requests = [case.add([1, 2, 3, 4][:num], 1000, ignore_eos=True) for num in (3, 4)]
        follow(case, 200)
    assert not any(request.num_accepted for request in requests)
    follow(case, 400)
    assert max(request.num_accepted for request in requests) > 50


def test_who_may_not_draft_is_not_read() -> None:
    case = Timed(HEAD, Headed())
    mute = case.add([1, 2, 3], 20, num_speculative_tokens=0, ignore_eos=True)
    other = case.add([1, 2, 4], 20, ignore_eos=True)
    case.run()
    assert not any(work.is_read for work in case.works_of(mute))
    assert any(work.is_read for work in case.works_of(other))


# ------------------------------------------------------------ the looks themselves


def looked(looks: Looks, steps: range, tell: Callable[[], None]) -> Sequence[int]:
    found = []
    for step in steps:
        if looks.is_due(step):
            found.append(step)
            tell()
    return found


def test_looks_that_fail_become_rare() -> None:
    looks = Looks()
    found = looked(looks, range(1, 400), looks.miss)
    assert found[:PATIENCE] == list(range(1, PATIENCE + 1))
    assert found[PATIENCE:] == [16, 32, 64, *range(128, 400, LAST)]
    looks.hit()
    assert looked(looks, range(400, 404), looks.hit) == list(range(400, 404))


def test_a_promise_is_tried_and_then_looks_are_rarer_than_before() -> None:
    looks = Looks(left=0, every=FIRST)
    looks.promise()
    assert looked(looks, range(9, 16), looks.wrong) == [*range(9, 9 + TRIAL * WRONG)]
    assert looks.every == 2 * FIRST


def test_silence_is_borne_longer() -> None:
    looks = Looks()
    found = looked(looks, range(1, 100), looks.nothing)
    assert found[: SILENT * PATIENCE] == list(range(1, SILENT * PATIENCE + 1))
    assert looks.every == FIRST


def test_no_room_is_noticed_when_requests_leave() -> None:
    looks = Looks(left=0, every=LAST)
    looks.soon(1)
    assert looked(looks, range(65, 70), looks.miss) == [65]
