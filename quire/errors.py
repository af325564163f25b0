"""Every error a user, a file or a request can cause, in one tree.

    QuireError
    ├── BadRequest        this request cannot be served as it stands; others go on
    ├── Overloaded        no room now; try again later
    ├── NotSupported      at start-up: names the feature, the reason and the alternative
    ├── CheckpointError   a model file is missing, damaged or unlike its config
    ├── OutOfMemory       the model or its cache does not fit; names what would
    ├── TransferError     pages did not come from another engine; they are computed
    └── EngineDead        the engine stopped; carries the cause
        └── RankLost      one of the processes that hold the model together is gone

Messages carry the value, the reason and the way out. What only our own code can cause is an
`assert`, never one of these.
"""

from __future__ import annotations

import reprlib


class QuireError(Exception):
    """Root of all errors Quire raises on purpose."""


class BadRequest(QuireError, ValueError):
    """The request's own fault: too long, empty, contradictory or out of range."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overloaded(QuireError):
    """The engine is full; the same request may succeed later."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotSupported(QuireError):
    """Asked for something this build, device or model cannot do."""


class CheckpointError(QuireError):
    """A model file is missing, truncated, corrupt or does not fit its config."""


class OutOfMemory(QuireError, MemoryError):
    """Weights, activations or the page pool do not fit the memory there is."""


class TransferError(QuireError):
    """Pages could not be had from another engine, or not be proved to be what they should."""


class EngineDead(QuireError):
    """The engine loop ended on an error it could not survive."""


class RankLost(EngineDead):
    """A rank died, failed or was late; the others cannot go on without it."""


def shown(value: object) -> str:
    """A value of unknown size and depth as a message carries it.

    >>> shown([1] * 1000)
    '[1, 1, 1, 1, 1, 1, ...]'
    """
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 64
