"""Parking: an engine that waits without its GPU memory, and is back in less than a second.

Process, compiled kernels and captured graphs stay; weights go to locked memory of the host, pages
are forgotten (`memory/vault.py`). What the tiers keep outside the pool they go on keeping. Where
that cannot be done the server parks a model by starting its process anew without weights
(`server/fleet.py`); a decision says why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from quire.config import Decision, EngineArgs
from quire.errors import NotSupported, OutOfMemory
from quire.memory.sizing import size_text
from quire.obs.log import log_event
from quire.runner.device import free_memory

if TYPE_CHECKING:
    from quire.engine.core import EngineCore
    from quire.memory.vault import Vault

SPARE = 2 << 30  # bytes of host memory that must be left beside the weights
HOST = torch.device("cpu")


class Place(Protocol):
    """`memory.vault.Vault`."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def has_copy(self) -> bool: ...

    def leave(self) -> None: ...

    def take(self) -> None: ...


class Parking:
    """Of an engine that can.

    >>> parking.park()                                                          # doctest: +SKIP
    >>> parking.unpark()                                                        # doctest: +SKIP
    """

    def __init__(self, place: Place, core: EngineCore) -> None:
        self.is_parked = False
        self._place, self._core = place, core

    @property
    def locked_bytes(self) -> int:
        """Of the host, for a copy of the weights; no system counts them as the process's."""
        return self._place.weight_bytes if self._place.has_copy else 0

    @property
    def weight_bytes(self) -> int:
        return self._place.weight_bytes

    def park(self) -> None:
        """Of an engine without requests. Raises OutOfMemory when the host has no room; then
        nothing has changed."""
        assert not self._core.has_work, "requests run"
        if self.is_parked:
            return
        begun, place = time.monotonic(), self._place
        if not place.has_copy and (why := why_no_room(place.weight_bytes)):
            raise OutOfMemory(why)
        self._core.save_now()
        place.leave()
        self._core.scheduler.kv.flush()
        self.is_parked = True
        self._tell("parked", begun)

    def unpark(self) -> None:
        """Raises OutOfMemory when others have the GPU's memory; then it stays parked."""
        if not self.is_parked:
            return
        begun = time.monotonic()
        self._place.take()
        self.is_parked = False
        self._tell("unparked", begun)

    def _tell(self, what: str, begun: float) -> None:
        weights, pages = size_text(self._place.weight_bytes), size_text(self._place.page_bytes)
        log_event(what, weights=weights, pages=pages, seconds=round(time.monotonic() - begun, 3))


def why_no_room(num_bytes: int) -> str | None:
    """Why the host cannot have a copy of the weights."""
    free = free_memory(HOST)
    if num_bytes + SPARE <= free:
        return None
    return (
        f"a copy of the weights takes {size_text(num_bytes)} of host memory and {size_text(SPARE)}"
        f" must be left, {size_text(free)} are available"
    )


class Offer(NamedTuple):
    """A place for weights and pages, or why there is none; neither where nobody asked."""

    vault: Vault | None = None
    why: str = ""

    @property
    def spare(self) -> int:
        """Bytes of a GPU that loading left over and nobody else can use."""
        return 0 if self.vault is None else self.vault.spare

    @contextmanager
    def weights(self) -> Iterator[None]:
        """What is made within can leave the GPU."""
        if self.vault is None:
            yield
        else:
            with self.vault.weights():
                yield

    @contextmanager
    def pages(self) -> Iterator[None]:
        if self.vault is None:
            yield
        else:
            with self.vault.pages():
                yield

    def taken(self, core: EngineCore, decisions: list[Decision]) -> Parking | None:
        """For an engine that was made inside."""
        vault, why = self.vault, self.why
        if vault is not None:
            weights, pages = vault.weight_bytes, vault.page_bytes
            is_all = weights > 0 and pages > 0
            why = (why_no_room(weights) or "") if is_all else "torch keeps weights elsewhere"
            if not why:
                what = f"{size_text(weights)} of weights to the host"
                why = f"{size_text(pages)} of pages are given back; the process stays"
                decisions.append(Decision("parking", what, why))
                return Parking(vault, core)
        if why:
            decisions.append(Decision("parking", "by a process without weights", why))
        return None


def offer_of(is_wanted: bool, args: EngineArgs, device: torch.device) -> Offer:
    """Before anything is loaded; `is_wanted`: by a server of several models."""
    if not is_wanted or device.type != "cuda":
        return Offer()
    if args.parallel.num_ranks > 1:
        return Offer(None, f"{args.parallel.num_ranks} ranks hold the model")
    if args.kv_role != "both":
        return Offer(None, f"kv_role={args.kv_role!r}: other engines take its pages")
    from quire.memory.vault import Vault

    try:
        return Offer(Vault(device))
    except NotSupported as error:
        return Offer(None, str(error))
