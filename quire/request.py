"""Request: one generation on its way, as the scheduler sees it. No tensors, no config.

There is no prefill or decode phase here. A request knows some tokens and has computed the keys
and values of the first few; each step it catches up. Two counters describe a step that was
launched and not yet committed, so that the next can be planned while the device works:

    tokens            [ prompt ................ | output ....... ] + num_pending sampled, unseen
    keys and values   [ num_computed ... | num_inflight ]

A step that verifies drafts has more tokens in flight than are known. Nothing more can be planned
for its request until it is settled: how many of them count is not known before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

from quire.params import SamplingParams

RequestId = NewType("RequestId", int)

NOT_RUNNING = -1
BACKGROUND = 2**31 - 1  # the last priority: gives way to every other, under any policy


class AdapterRef(NamedTuple):
    """The adapter a request runs with, once it is in memory."""

    number: int = 0  # by which the runner knows it; 0: none
    digest: bytes = b""  # of its weights: cached pages are found by it


NO_ADAPTER = AdapterRef()


@dataclass(slots=True)
class Timing:
    """Clock readings of one request, in seconds of the engine's clock."""

    arrival: float = 0.0
    scheduled: float | None = None  # first time it was given a row
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """Mutable by the scheduler and the KV manager only.

    >>> r = Request.new(1, [5, 6, 7], SamplingParams(max_tokens=4))
    >>> r.num_known, r.num_to_feed
    (3, 3)
    """

    id: RequestId
    tokens: array[int]  # prompt then output
    num_prompt: int
    params: SamplingParams
    max_tokens: int  # params.max_tokens cut to the context that is left
    seed: int
    eos_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower runs earlier, as in vLLM
    cache_salt: str = ""
    tenant: str = ""  # whose it is: the key that fair queueing and shares go by
    weight: float = 1.0  # of that key
    adapter_name: str = ""  # asked for; "": none
    adapter: AdapterRef = NO_ADAPTER  # set when the request enters the engine
    kv_source: str = ""  # ticket for the prompt's pages in another engine; empty: there is none
    kv_lease: bool = False  # another engine will ask for the prompt's pages
    children: list[Request] = field(default_factory=list)  # n > 1: start once our prompt is in
    hint: tuple[int, ...] = ()  # tokens that may be much like the output (`spec/hint.py`)

    row: int = NOT_RUNNING
    home: int = 0  # the rank that keeps its pages, where each has requests of its own
    num_computed: int = 0
    num_inflight: int = 0
    num_pending: int = 0
    num_cached: int = 0  # prompt tokens taken from the prefix cache at first admission
    cache_note: str = ""  # why there was no (or no longer) hit
    num_preempted: int = 0
    turn: float = 0.0  # of a fair line's clock, when it first started
    num_lost: int = 0  # tokens whose keys and values a preemption threw away
    num_drafted: int = 0  # guesses verified so far
    num_accepted: int = 0  # of those, the ones that were right and are part of the output
    draft_seconds: float = 0.0  # of the host, its share of what making them took
    timing: Timing = field(default_factory=Timing)

    @staticmethod
    def new(
        id: int,
        prompt: Iterable[int],
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        eos_ids: Iterable[int] = (),
        priority: int = 0,
        cache_salt: str = "",
        seed: int = 0,
        arrival: float = 0.0,
    ) -> Request:
        tokens = array("i", prompt)
        return Request(
            id=RequestId(id),
            tokens=tokens,
            num_prompt=len(tokens),
            params=params,
            max_tokens=max_tokens if max_tokens is not None else (params.max_tokens or 1 << 30),
            seed=params.seed if params.seed is not None else seed,
            eos_ids=frozenset(eos_ids),
            priority=priority,
            cache_salt=cache_salt,
            timing=Timing(arrival=arrival),
        )

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :].tolist()

    @property
    def num_known(self) -> int:
        """Tokens the model could be fed, whether or not the host has seen their ids yet."""
        return len(self.tokens) + self.num_pending

    @property
    def num_to_feed(self) -> int:
        return self.num_known - self.num_computed - self.num_inflight

    @property
    def is_running(self) -> bool:
        return self.row != NOT_RUNNING

    @property
    def is_background(self) -> bool:
        return self.priority == BACKGROUND

    def forget_progress(self) -> None:
        """Back to the waiting line: pages are gone, known tokens stay."""
        self.row = NOT_RUNNING
        self.num_lost = max(self.num_lost, self.num_computed)
        self.num_computed = self.num_inflight = self.num_pending = 0
