"""What the first rank tells the others, and what they report: typed msgspec structs, never pickle.

Tensors do not pass here: they go from rank to rank in the middle of a step (`dist/comm.py`).
`wire.py` puts these into frames.
"""

from __future__ import annotations

import msgspec

from quire.config import EngineArgs
from quire.engine.wire import Codec
from quire.step import StepPlan


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Load your share of a model."""

    args: EngineArgs
    rank: int
    size: int
    meeting: str  # a path where ranks find each other, or host and port
    comm: str  # "shared" memory, or "gloo"
    deadline_s: float  # how long ranks wait for one another in a step
    digest: str = ""  # of the model, for those who have files of their own


class Pages(msgspec.Struct, frozen=True, tag=True):
    """So many pages has everybody's cache."""

    count: int


class Step(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Draw for the oldest step that is under way; stages behind the first have nothing to do."""


class Rebalance(msgspec.Struct, frozen=True, tag=True):
    """Look which experts were visited most, and copy those."""


class PutAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter from a folder, under a number that admissions name."""

    number: int
    path: str


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    number: int


class End(msgspec.Struct, frozen=True, tag=True):
    """Forget the model; another may follow."""


class Here(msgspec.Struct, frozen=True, tag=True):
    """The process is up."""


class SameModel(msgspec.Struct, frozen=True, tag=True):
    """What is here is what the digest is of."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last words of a rank."""

    error: str


Order = Begin | Pages | Step | Settle | Rebalance | PutAdapter | DropAdapter | End
Report = Here | SameModel | Ready | Failed


def orders() -> Codec[Order]:
    return Codec(Order)


def reports() -> Codec[Report]:
    return Codec(Report)
