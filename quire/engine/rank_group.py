"""RankGroup: the other ranks of a model, as the first one sees them.

It starts their processes, sends them what to load and then each step's plan, and notices when one
of them is gone. A group that lost a rank is of no further use: all of it ends, and whoever asks
hears why. `rank_worker.py` is the far end.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from quire.config import Decision, EngineArgs, Parallel
from quire.dist.gloo import meeting_store
from quire.dist.launch import Rank, end, launch
from quire.dist.ranks import Ranks
from quire.engine import rank_messages as msg
from quire.engine.model_digest import model_digest
from quire.engine.rank_nodes import await_nodes
from quire.engine.rank_places import (
    carrier_between,
    host_carrier,
    named,
    rank_decisions,
    rank_places,
    ranks_of,
    threads_shared,
)
from quire.engine.wire import is_readable, receive
from quire.errors import RankLost
from quire.native.exchange import make_memory
from quire.obs.log import log_event
from quire.step import StepPlan

WORKER = "quire.engine.rank_worker"
LOOK_S = 0.2  # between looks at whether processes that we wait for are alive
START_S = 120.0  # for a process to import what it needs
LAST_WORDS_S = 1.0
DEADLINE_S = 60.0
SILENCE_S = 60.0  # of a rank that loads and beats every second (`rank_beat.py`)
LOST = 72  # exit code

R = TypeVar("R", bound=msg.Report)


class RankGroup:
    def __init__(
        self,
        size: int,
        comm: str = "auto",
        deadline_s: float = DEADLINE_S,
        nodes: Parallel | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`comm`: how ranks talk in a step, "shared" or "gloo"; "auto": the first that can be.
        `deadline_s`: how long they wait for one another there. `nodes`: the machines they are on;
        None: this one alone. `silence_s`: how long one that loads may be silent. Raises RankLost
        when another one does not come."""
        self.size, self.deadline_s, self._silence_s = size, deadline_s, silence_s
        self._nodes = nodes if nodes is not None and nodes.nnodes > 1 else None
        if comm == "auto" or self._nodes is not None:
            comm = host_carrier(self._nodes or Parallel())
        self.comm = comm  # through memory of the host
        self._carrier = comm  # of the model there is
        self._places: tuple[str, ...] = ()  # GPUs of its ranks, if they are on GPUs
        self.decisions: Sequence[Decision] = ()  # about these
        self._folders: list[tempfile.TemporaryDirectory[str]] = []  # where ranks of a model meet
        self._stores: list[object] = []  # the same, of several machines
        self._others = _start(size, self._nodes)
        self._ended = weakref.finalize(self, _end, self._others, self._folders)
        self._orders, self._reports = msg.orders(), msg.reports()
        self._why: str | None = None  # it is lost
        self._are_here = False
        self._shares_first = 0  # how many ranks are on the first stage with us
        self.ready: Sequence[msg.Ready] = ()  # what the others said when the model was loaded
        self.num_models = 0  # so far
        self.has_model = False

    # ------------------------------------------------------------ a model

    def begin(self, args: EngineArgs) -> tuple[EngineArgs, Ranks]:
        """Everybody loads a model of these arguments, or of those returned."""
        if not self._are_here:
            self.await_all(msg.Here, START_S)
            self._are_here = True
        args = threads_shared(args)
        self._shares_first = args.parallel.num_beside - 1
        self.num_models, self.has_model = self.num_models + 1, True
        self._places = rank_places(args)
        carrier = carrier_between(args, self._places, self.comm)
        self._carrier = carrier.name
        self.decisions = rank_decisions(args.parallel, self._places, carrier)
        meeting = self._meeting(args.parallel)

        def order(rank: int) -> msg.Begin:
            own = replace(args, device=self._places[rank]) if self._places else args
            place = (own, rank, self.size, meeting, self._carrier, self.deadline_s)
            sharers = self._places.count(own.device) if self._places else 1
            digest = "" if self._nodes is None else model_digest(args)
            return msg.Begin(*place, sharers, digest)

        for other in self._others:
            self.tell(order(other.rank), (other,))
            other.link.settimeout(self.deadline_s)
        if self._nodes is not None:
            self.await_all(msg.SameModel, START_S)
        try:
            own = order(0)
            return own.args, ranks_of(own, self._lives)
        except RuntimeError as error:  # somebody did not come to the meeting
            raise self.lost(error) from error

    def _meeting(self, asked: Parallel) -> str:
        """A place where ranks of one model find each other."""
        if self._nodes is not None:
            store = meeting_store(self._nodes.master_addr)
            self._stores.append(store)
            return f"{self._nodes.master_addr}:{store.port}"
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._folders.append(tempfile.TemporaryDirectory(prefix="quire-ranks-", dir=memory))
        meeting, sharing = Path(self._folders[-1].name) / "meeting", asked.num_beside
        if self._carrier == "shared" and sharing > 1:
            for stage in range(asked.pipeline_parallel_size):
                make_memory(named(meeting, f"-beside-{stage}"), sharing)
        return str(meeting)

    def set_pages(self, count: int) -> int:
        """The pages that everybody gets; on GPUs, as many as fit into each. Raises RankLost.
        Loading takes as long as it takes, but not in silence."""
        if self._places:
            count = min([count, *(report.count for report in self.await_all(msg.Fits, None))])
        self.tell(msg.Pages(count))
        self.ready = self.await_all(msg.Ready, None)
        if self._carrier == "shared":
            self._folders.pop().cleanup()  # all have it mapped; whatever kills us, none is left
        return count

    def announce(self, plan: StepPlan) -> None:
        """Everybody executes this plan next. Raises RankLost."""
        self.tell(msg.Step(plan))

    def rebalance(self) -> None:
        self.tell(msg.Rebalance())

    def settle(self) -> None:
        """Everybody draws for the oldest step under way. Raises RankLost."""
        if self._shares_first:
            self.tell(msg.Settle(), self._others[: self._shares_first])

    def share_queries(self) -> None:
        """All behind the first, and then the first too. Raises RankLost."""
        self.tell(msg.ShareQueries())

    def give_prompts(self, are_read: bool) -> None:
        self.tell(msg.GivePrompts(are_read))

    def hand_over(self, every_token: bool) -> None:
        self.tell(msg.HandOver(every_token))

    def forget(self) -> None:
        """The model's runner must not be used again."""
        self.has_model = False
        self.tell(msg.End())

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        self._why = self._why or "it was closed"
        self._ended()

    def trouble(self) -> str | None:
        """Why this group is of no further use; None: everybody lives."""
        if self._why is None:
            ended = [(other, other.fate()) for other in self._others]
            said = [f"rank {other.rank} {fate}" for other, fate in ended if fate is not None]
            if said:
                return "; ".join(said)
        return self._why

    def exit_if_lost(self) -> None:
        """For a process that is started anew when it ends, even where nobody waits for a step."""
        if (why := self.trouble()) is not None:
            log_event("rank_lost", severity=logging.ERROR, why=why)
            os._exit(LOST)

    def _lives(self) -> bool:
        return self.trouble() is None

    def lost(self, cause: BaseException) -> RankLost:
        """Ends the group; what to raise for whatever kept the first rank from going on."""
        if self._why is None:
            told = [words for other in self._others if (words := self._last_words(other))]
            self._why = "; ".join(told) or f"rank 0: {type(cause).__name__}: {cause}"
        error = RankLost(
            f"the {self.size} ranks that hold the model cannot go on: {self._why}; make a new"
            " engine (a server does so by itself)"
        )
        for other in self._others:
            other.kill()  # one that hangs would not hear anything else
        self._ended()
        return error

    def _last_words(self, other: Rank) -> str | None:
        until = time.monotonic() + LAST_WORDS_S
        while (left := until - time.monotonic()) > 0 and _has_news(other, left):
            body = receive(other.link)
            if body is None:
                break
            if isinstance(report := self._reports.decode(body), msg.Failed):
                return f"rank {other.rank}: {report.error}"
        fate = other.fate(LAST_WORDS_S)
        return None if fate is None else f"rank {other.rank} {fate}"

    # ------------------------------------------------------------ frames

    def tell(self, order: msg.Order, to: tuple[Rank, ...] | None = None) -> None:
        """Raises RankLost."""
        if self._why is not None:
            raise self.lost(RuntimeError())
        frame = self._orders.frame(order)
        try:
            for other in self._others if to is None else to:
                other.link.sendall(frame)
        except OSError as error:
            raise self.lost(error) from error

    def await_all(self, kind: type[R], seconds: float | None) -> list[R]:
        """The same report of everybody, by rank; answers that nobody waits for any more are passed
        over. `seconds`: for all; None: as long as everybody beats. Raises RankLost."""
        until = None if seconds is None else time.monotonic() + seconds
        found: list[R] = []
        for other in self._others:
            heard = time.monotonic()
            while len(found) < other.rank:
                if not _has_news(other, LOOK_S):
                    now = time.monotonic()
                    if until is not None and now > until:
                        late = f"rank {other.rank} is not up in {seconds:g} s"
                        raise self.lost(TimeoutError(late))
                    if until is None and now > heard + self._silence_s:
                        silent = f"rank {other.rank} fell silent for {self._silence_s:g} s"
                        raise self.lost(TimeoutError(f"{silent} while it loaded"))
                    continue
                report, heard = self._report(other), time.monotonic()
                if isinstance(report, kind):
                    found.append(report)
                elif not isinstance(report, msg.Fetched | msg.Beat):
                    raise self.lost(RuntimeError(f"rank {other.rank} said {report}"))
        return found

    def news(self) -> list[msg.Report]:
        """What has come of anybody; does not wait. Raises RankLost."""
        if self._why is not None:
            raise self.lost(RuntimeError())
        found = []
        for other in self._others:
            while _has_news(other, 0.0):
                found.append(self._report(other))
        return found

    def _report(self, other: Rank) -> msg.Report:
        """The next frame."""
        body = receive(other.link)
        report = None if body is None else self._reports.decode(body)
        if isinstance(report, msg.Failed):
            self._why = f"rank {other.rank}: {report.error}"
        if report is None or isinstance(report, msg.Failed):
            raise self.lost(RuntimeError(f"rank {other.rank} said {report}"))
        return report


def _start(size: int, nodes: Parallel | None) -> tuple[Rank, ...]:
    """Everybody behind the first, here and on other machines."""
    here = launch(WORKER, size if nodes is None else size // nodes.nnodes)
    try:
        return here if nodes is None else (*here, *await_nodes(nodes))
    except BaseException:
        end(here)
        raise


def _has_news(other: Rank, seconds: float) -> bool:
    """Whether a frame has come, or the end of them."""
    return is_readable(other.link, seconds)


def _end(others: tuple[Rank, ...], folders: list[tempfile.TemporaryDirectory[str]]) -> None:
    end(others)
    for folder in folders:
        folder.cleanup()
