"""Commands and reports: all that crosses between the API process and the engine process.

Typed msgspec structs, one per control verb, tagged so that a message says what it is. Adding a verb
is one struct here and one handler in `process.py`. Token events cross as the `TokenEvent` values
the scheduler makes; strings of text never do. `wire.py` puts these into frames.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from quire.config import Decision
from quire.errors import BadRequest
from quire.params import SamplingParams
from quire.request import Request, Timing
from quire.step import TokenEvent

ID_BYTES = 4
QUEUE_TIMEOUT = "queue_timeout"  # the error of a request that waited too long to start
BUSY = "requests run"  # why an engine is not parked now
NO_MEMORY = "no memory: "  # how the error begins where the device or the host has too little
ADAPTER_GONE = "adapter_gone"  # of one whose adapter was unloaded while it was on its way


class Child(msgspec.Struct, frozen=True, array_like=True):
    """One more answer to the same prompt (n > 1)."""

    id: int
    seed: int
    params: SamplingParams


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A checked request; the tokens as little-endian int32."""

    id: int
    tokens: bytes
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_ids: list[int]
    priority: int
    cache_salt: str
    arrival: float
    tenant: str
    weight: float
    children: list[Child] = []
    hint: bytes = b""  # tokens, as above
    adapter: str = ""
    kv_source: str = ""
    kv_lease: bool = False

    def __post_init__(self) -> None:
        for ids in (self.tokens, self.hint):
            if len(ids) % ID_BYTES:
                raise ValueError(f"{len(ids)} bytes of token ids")
        if not self.weight > 0:
            raise ValueError(f"a weight of {self.weight}")


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[int]


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Forget cached prefixes; the reply is the number of pages emptied."""

    number: int


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Run no step until Resume; requests wait."""

    number: int


class Resume(msgspec.Struct, frozen=True, tag=True):
    number: int


class Park(msgspec.Struct, frozen=True, tag=True):
    """Leave the GPU's memory; requests wait. Refused with BUSY while there are any."""

    number: int


class Unpark(msgspec.Struct, frozen=True, tag=True):
    """Take it again. Refused with NO_MEMORY and a reason while others have it."""

    number: int


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Profile the next steps, fewer if the work ends; the reply: a trace, and how many there were.

    Refused when there is no step to come.
    """

    number: int
    num_steps: int


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Send snapshots this often from now on; 0 ends it."""

    hz: float


class TellCache(msgspec.Struct, frozen=True, tag=True):
    """The reply: how cached prefixes changed since that number of that epoch (`kv/cache_news`)."""

    number: int
    epoch: str
    since: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read a folder and serve it under a name."""

    number: int
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    number: int
    name: str


Control = (
    Flush
    | Pause
    | Resume
    | Park
    | Unpark
    | Profile
    | Watch
    | TellCache
    | LoadAdapter
    | UnloadAdapter
)
Command = Submit | Abort | Control


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests may name."""

    name: str
    path: str
    rank: int
    num_bytes: int
    digest: bytes = b""  # of its weights: cached answers are found by it


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message on a connection: who the engine is and what it decided."""

    pid: int
    version: str
    architecture: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    hidden_size: int
    eos_ids: list[int]
    decisions: list[Decision]
    load_seconds: float
    num_params: int = 0
    first_id: int = 0  # ids of requests on this connection count from here
    adapters: list[AdapterInfo] = []
    is_parked: bool = False


class AdapterList(msgspec.Struct, frozen=True, tag=True):
    """All there are, after one came or went."""

    adapters: list[AdapterInfo]


class About(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a request at its first token and at its end; clocks are monotonic."""

    id: int
    num_cached: int
    cache_note: str
    num_preempted: int
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    kv_ticket: str = ""  # for an engine that decodes; empty: none was asked for, or there is none


class Events(msgspec.Struct, frozen=True, tag=True):
    """News of one step."""

    events: list[TokenEvent]
    about: list[About] = []


Value = int | float | str | dict[str, int | str] | None


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a numbered command."""

    number: int
    value: Value = None
    error: str | None = None


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Sent every second from its own thread: the process lives, and when it last made progress."""

    counts: dict[str, float]
    has_work: bool
    is_paused: bool
    stalled_s: float  # seconds since the loop last turned while there was work
    is_parked: bool = False
    # Tokens of each expert so far, by layer; empty when nothing is new.
    expert_tokens: dict[int, list[int]] = {}


class Snapshot(msgspec.Struct, frozen=True, tag=True):
    picture: dict[str, Any]


ReportOfEngine = Hello | Reply | Beat | Snapshot | AdapterList  # and not of a request
Report = Events | ReportOfEngine


def submit_of(leader: Request) -> Submit:
    params = leader.params
    return Submit(
        id=leader.id,
        tokens=leader.tokens.tobytes(),
        params=params,
        max_tokens=leader.max_tokens,
        seed=leader.seed,
        eos_ids=list(leader.eos_ids),
        priority=leader.priority,
        cache_salt=leader.cache_salt,
        arrival=leader.timing.arrival,
        tenant=leader.tenant,
        weight=leader.weight,
        children=[Child(c.id, c.seed, c.params) for c in leader.children],
        hint=array("i", leader.hint).tobytes(),
        adapter=leader.adapter_name,
        kv_source=leader.kv_source,
        kv_lease=leader.kv_lease,
    )


def check_ids(request: Request, vocab_size: int) -> None:
    """The last check before the device, where an id outside the vocabulary is a fault for everyone.

    `Intake` has checked this already; raises BadRequest for a request that came another way.
    """
    tokens, hint = request.tokens, request.hint
    least, most = min(hint, default=0), max(hint, default=0)
    if not tokens or min(least, min(tokens)) < 0 or max(most, max(tokens)) >= vocab_size:
        raise BadRequest(f"got token ids outside 0 <= id < {vocab_size}, or none at all")


def requests_of(command: Submit) -> list[Request]:
    """The leader and its children, as the scheduler wants them."""
    tokens, hint = array("i"), array("i")
    tokens.frombytes(command.tokens)
    hint.frombytes(command.hint)

    def request(id: int, seed: int, params: SamplingParams) -> Request:
        made = Request.new(
            id,
            tokens,
            params,
            max_tokens=command.max_tokens,
            eos_ids=command.eos_ids,
            priority=command.priority,
            cache_salt=command.cache_salt,
            seed=seed,
        )
        made.timing = Timing(arrival=command.arrival)
        made.tenant, made.weight = command.tenant, command.weight
        made.adapter_name = command.adapter
        return made

    made = [request(command.id, command.seed, command.params)]
    made[0].kv_source, made[0].kv_lease = command.kv_source, command.kv_lease
    made += [request(child.id, child.seed, child.params) for child in command.children]
    made[0].children, made[0].hint = made[1:], tuple(hint)
    return made


def about(request: Request, kv_ticket: str = "") -> About:
    timing = request.timing
    return About(
        request.id,
        request.num_cached,
        request.cache_note,
        request.num_preempted,
        timing.scheduled,
        timing.first_token,
        timing.last_token,
        kv_ticket,
    )
