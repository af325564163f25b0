"""StepPlan and StepResult: all that crosses between scheduler and runner.

Plain, flat, immutable values (msgspec can encode them as they stand): the same plan drives the
model runner, a test double and, later, other ranks. A request lives in one *row* of the runner's
tables from admission to release; a plan carries only what changed: new rows, new pages, and who
feeds how many tokens. Token ids sampled on the device are never sent back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from quire.params import SamplingParams
from quire.request import Request, RequestId


class Admission(NamedTuple):
    """A request takes a row: everything the runner must know of it."""

    request_id: RequestId
    row: int
    tokens: Sequence[int]  # all known ids: prompt, and output so far if it was preempted
    num_prompt: int
    params: SamplingParams
    seed: int
    banned_until_min: tuple[int, ...]  # eos and stop ids, banned while output < min_tokens
    adapter: int = 0  # number of its adapter; 0: none
    home: int = 0  # the rank that keeps its pages and attends its rows (`kv/homes.py`)

    @staticmethod
    def of(request: Request) -> Admission:
        params, ids = request.params, request.tokens.tolist()
        banned = (*request.eos_ids, *(params.stop_token_ids or ())) if params.min_tokens else ()
        known = (ids, request.num_prompt, params, request.seed)
        whose = (banned, request.adapter.number, request.home)
        return Admission(request.id, request.row, *known, *whose)


class Draft(NamedTuple):
    """Guesses at what one request draws next, to be verified in one step."""

    num: int
    tokens: tuple[int, ...] = ()  # empty: the runner makes them
    parents: tuple[int, ...] = ()  # of a tree (`spec/tree.py`); empty: each follows the one before


class Work(NamedTuple):
    """One request's share of a step: feed positions [start, start + num_tokens).

    The last `num_drafts` of them are guesses. With drafts a token is drawn after the newest known
    one and after each draft; the result keeps those up to the first that is not the next draft
    (`spec/verify.py`).

    Drafts may be a tree: then they lie one behind the other all the same, in the slots and in the
    row of the positions [start + 1, start + num_tokens), their *places*. The position of a draft is
    that of its parent and one.
    """

    request_id: RequestId
    row: int
    start: int
    num_tokens: int
    sample: bool  # the newest known token is fed: draw its successor
    num_drafts: int = 0
    drafts: tuple[int, ...] = ()  # their ids; empty: the runner makes them
    parents: tuple[int, ...] = ()  # of a tree (`spec/tree.py`); empty: each follows the one before
    is_read: bool = True  # False: no drafts follow from this step, so no head needs its states

    def drafting(self, draft: Draft, num: int) -> Work:
        """The same with the first `num` of these drafts behind its one token."""
        assert self.num_tokens == 1 and self.sample
        tokens, parents = draft.tokens[:num], draft.parents[:num]
        return Work(*self[:3], 1 + num, True, num, tokens, parents)


class PageWrite(NamedTuple):
    """page_table[group, row, column] = page."""

    row: int
    column: int
    page: int
    group: int = 0  # of layers that share a page table


class PageCopy(NamedTuple):
    """Copy-on-write: before the step, all layers' content of one page goes to another."""

    source: int
    target: int


class PageSave(NamedTuple):
    """A full, verified page of a prefix, of all layer groups, is also kept outside the pool."""

    key: bytes  # of its node in the prefix tree
    tokens: bytes  # int32 ids
    pages: tuple[int, ...]  # by group


class PageLoad(NamedTuple):
    """One group's share of what was saved under a key goes into a page."""

    key: bytes
    group: int
    page: int


class StepForm(NamedTuple):
    """How a runner executes a step: kernel by kernel, or as one of its captured graphs."""

    kind: Literal["kernels", "decodes", "prompt", "mixed"] = "kernels"
    num_tokens: int = 0  # that the step is padded to; 0: it is not
    num_singles: int = 0  # of a mixed step: single tokens that attention is laid out for
    captures: bool = False  # the graph is captured in this step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of effects: admissions, page saves, page copies, page loads, page writes,
    then the forward. Saves come first: a page that was given back may be another's already."""

    works: tuple[Work, ...] = ()
    admissions: tuple[Admission, ...] = ()
    page_writes: tuple[PageWrite, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    # Everyone decodes, and many neighbours among the works have the same pages in front.
    shares_prefix: bool = False
    saves: tuple[PageSave, ...] = ()
    loads: tuple[PageLoad, ...] = ()
    is_background: bool = False  # nobody waits for it: it may be given up when somebody comes
    form: StepForm | None = None  # where ranks must agree, as the first says; None: the runner's

    @property
    def has_effect(self) -> bool:
        """Whether there is anything to execute, works or not."""
        return bool(self.works or self.page_writes or self.page_copies or self.saves or self.loads)

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.works)


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token and the most likely ones."""

    token: int
    logprob: float
    rank: int
    top_tokens: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back; lists are aligned with the plan's works."""

    # Empty for works that did not sample; with drafts those accepted and one token more.
    sampled: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[TokenLogprobs]] | None = None
    # work index -> logprobs of the prompt tokens that this work's positions predict
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None
    pooled: dict[int, list[float]] | None = None  # work index -> embedding of its whole prompt
    failed: dict[int, str] | None = None  # work index -> why this request cannot go on
    # work index -> drafts of its tree that were right, 1 is the first, as they follow each other
    branches: dict[int, Sequence[int]] | None = None
    is_given_up: bool = False  # the works are to be done again; all else of the plan was done
    seconds: float | None = None  # that the device was at it, where the runner has its clock


class TokenEvent(NamedTuple):
    """News of one request. Every submitted request ends in exactly one event with a finish."""

    request_id: RequestId
    tokens: Sequence[int]
    finish: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    prompt_start: int = 0  # position that predicts the first of prompt_logprobs
    pooled: Sequence[float] = ()  # the embedding, on the last event of a pooling request
    error: str | None = None  # what went wrong, when finish is "error"
    num_drafted: int = 0  # drafts that were verified in the step
    num_accepted: int = 0  # of `tokens`, those that were drafts
    branch: tuple[int, ...] = ()  # of a tree, which drafts were right


class Took(NamedTuple):
    """How long a step took."""

    seconds: float
    was_awaited: bool = True  # False: it was launched while the one before it still ran


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for this step and return what it produced."""
        ...


class Runner(Protocol):
    """Whatever turns plans into results: a model, other ranks, a simulation, a test double."""

    def execute(self, plan: StepPlan) -> Pending:
        """Launch one step; plans take effect in the order of the calls."""
        ...
