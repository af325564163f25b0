"""What the first rank tells the others, and what they report: typed msgspec structs, never pickle.

Tensors do not pass here: they go from rank to rank in the middle of a step (`dist/comm.py`).
`wire.py` puts these into frames.
"""

from __future__ import annotations

import msgspec

from quire.config import EngineArgs
from quire.engine.wire import Codec
from quire.kv.tier_index import Wanted
from quire.request import RequestId
from quire.step import StepPlan


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Load your share of a model."""

    args: EngineArgs
    rank: int
    size: int
    meeting: str  # a path where ranks find each other, or host and port
    comm: str  # "shared" memory, "gloo", "network", "nccl" or "peer"
    deadline_s: float  # how long ranks wait for one another in a step
    sharers: int = 1  # ranks on your GPU, you included
    digest: str = ""  # of the model, for those who have files of their own


class Pages(msgspec.Struct, frozen=True, tag=True):
    """So many pages has everybody's cache."""

    count: int


class Fits(msgspec.Struct, frozen=True, tag=True):
    """So many pages fit into the GPU here."""

    count: int


class Step(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Draw for the oldest step that is under way; stages behind the first have nothing to do."""


class Rebalance(msgspec.Struct, frozen=True, tag=True):
    """Look which experts were visited most, and copy those."""


class ShareQueries(msgspec.Struct, frozen=True, tag=True):
    """Even out the key heads that several ranks have by the queries of all."""


class GivePrompts(msgspec.Struct, frozen=True, tag=True):
    """The first rank reads hidden states of prompts; or no longer, and makes logprobs of them."""

    are_read: bool


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """A head on the first rank reads hidden states of steps that may draft."""

    every_token: bool  # those after the last norm too, so that no step may leave tokens out


class PutAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter from a folder, under a number that admissions name."""

    number: int
    path: str


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    number: int


class SaveAdapter(msgspec.Struct, frozen=True, tag=True):
    """Copy your share to memory of your host."""

    number: int


class RestoreAdapter(msgspec.Struct, frozen=True, tag=True):
    """Bring it back from there."""

    number: int


class ForgetAdapter(msgspec.Struct, frozen=True, tag=True):
    """The copy goes."""

    number: int


class OpenTiers(msgspec.Struct, frozen=True, tag=True):
    """Keep your shares of pages from now on, on disk as well where there is a mark."""

    mark: bytes  # of everybody's weights and forms


class FetchPages(msgspec.Struct, frozen=True, tag=True):
    """Hold these in memory for a request, as many of the first as you can."""

    number: int
    owner: RequestId
    wanted: tuple[Wanted, ...]


class LetGo(msgspec.Struct, frozen=True, tag=True):
    """The request needs its pages outside the pool no more."""

    owner: RequestId


class CloseTiers(msgspec.Struct, frozen=True, tag=True):
    """Write what waits to be written, and give the folder back."""

    seconds: float


class End(msgspec.Struct, frozen=True, tag=True):
    """Forget the model; another may follow."""


class Here(msgspec.Struct, frozen=True, tag=True):
    """The process is up."""


class SameModel(msgspec.Struct, frozen=True, tag=True):
    """What is here is what the digest is of."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    mark: bytes = b""  # of what decides the bytes of pages here, where they go to a disk
    trouble: str = ""  # why there is none


class TiersOpen(msgspec.Struct, frozen=True, tag=True):
    trouble: str = ""  # why there is no disk


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """So many of the first nodes are held."""

    number: int
    count: int


class TiersClosed(msgspec.Struct, frozen=True, tag=True):
    """All is written, or there was no time."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """We are still at it."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last words of a rank."""

    error: str


Adapting = PutAdapter | DropAdapter | SaveAdapter | RestoreAdapter | ForgetAdapter
Tiering = OpenTiers | FetchPages | LetGo | CloseTiers
Reading = GivePrompts | HandOver
Balancing = Rebalance | ShareQueries
Order = Begin | Pages | Step | Settle | Reading | Balancing | Adapting | Tiering | End
Report = Here | SameModel | Fits | Ready | TiersOpen | Fetched | TiersClosed | Beat | Failed


def orders() -> Codec[Order]:
    return Codec(Order)


def reports() -> Codec[Report]:
    return Codec(Report)
