"""The process of a rank behind the first: load a share of a model, execute every plan that comes.

Orders arrive on a socket, read by a thread of its own: when the socket ends, so does the process,
even in the middle of a collective. Whatever goes wrong is reported and final: the first rank ends
the group.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from quire.engine import rank_messages as msg
from quire.engine.rank_beat import beating
from quire.engine.wire import receive
from quire.errors import CheckpointError
from quire.forward import StateReads

if TYPE_CHECKING:
    from torch import Tensor

    from quire.engine.rank_tiers import OtherTiers
    from quire.request import RequestId
    from quire.runner.runner import ModelRunner

ORPHANED, FAILED = 75, 1
FLUSH_S = 2.0  # to write pages that wait for the disk


def main() -> int:
    return serve(socket.socket(fileno=int(sys.argv[1])))


def serve(link: socket.socket, own_host: str = "", model: str | None = None) -> int:
    """`own_host`: where other machines reach this one. `model`: where it is here; None: where the
    first rank has it."""
    inbox: queue.SimpleQueue[msg.Order] = queue.SimpleQueue()
    say = Speaker(link)
    threading.Thread(target=_listen, args=(link, inbox), name="orders", daemon=True).start()
    try:
        import quire.engine.build  # noqa: F401 (what takes long, before anybody waits for it)

        say(msg.Here())
        while True:
            begin = inbox.get()
            assert isinstance(begin, msg.Begin), f"got {begin}, want a model"
            if model is not None:
                begin = msgspec.structs.replace(begin, args=replace(begin.args, model=model))
            _serve(begin, inbox, say, own_host)
    except BaseException as error:
        say(msg.Failed(f"{type(error).__name__}: {error}"))
        raise


class Speaker:
    """Reports to the first rank; threads that read a disk have some as well."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._reports, self._lock = msg.reports(), threading.Lock()

    def __call__(self, report: msg.Report) -> None:
        with self._lock:
            self.link.sendall(self._reports.frame(report))


def _listen(link: socket.socket, inbox: queue.SimpleQueue[msg.Order]) -> None:
    orders = msg.orders()
    while (body := receive(link)) is not None:
        inbox.put(orders.decode(body))
    os._exit(ORPHANED)


def _serve(
    begin: msg.Begin, inbox: queue.SimpleQueue[msg.Order], say: Speaker, own_host: str
) -> None:
    """One model, until it is forgotten."""
    from quire.engine.build import build_engine
    from quire.engine.model_digest import model_digest
    from quire.engine.rank_places import ranks_of
    from quire.engine.seat import OtherSeat
    from quire.load.open import open_model
    from quire.runner.joint_graphs import end_graphs

    def await_pages() -> int:
        pages = inbox.get()
        assert isinstance(pages, msg.Pages), f"got {pages}, want a number of pages"
        return pages.count

    # What the first rank measures and drafts reaches us in its plans.
    args = replace(begin.args, skip_tokenizer_init=True, target_gap_ms=0.0, lora=None)
    args = replace(args, speculative_config=None)
    if begin.digest:
        if model_digest(args) != begin.digest:
            raise CheckpointError(
                f"{args.model} on this machine is another model than the first one has; copy that"
            )
        say(msg.SameModel())

    def agree(count: int) -> int:
        say(msg.Fits(count))
        return await_pages()

    on_gpu = args.device.startswith("cuda")
    with beating(say.link, say):
        ranks = ranks_of(begin, own_host=own_host)
        seat = OtherSeat(args, ranks, await_pages, agree if on_gpu else None)
        runner = build_engine(args, open_model(args).checkpoint, seat=seat).runner
    assert seat.tiers is not None
    say(msg.Ready(seat.tiers.mark, seat.tiers.trouble))
    while not isinstance(order := inbox.get(), msg.End):
        _obey(order, runner, seat.tiers, say)
    end_graphs(runner.graphs)
    seat.tiers.close(FLUSH_S)


def _obey(order: msg.Order, runner: ModelRunner, tiers: OtherTiers, say: Speaker) -> None:
    from quire.engine.cache_form import share_queries
    from quire.runner.stage_runner import BesideFirstRunner

    assert runner.adapters is not None
    match order:
        case msg.Step(plan):
            runner.execute(plan).result()
        case msg.Settle():
            assert isinstance(runner, BesideFirstRunner)
            runner.settle()
        case msg.GivePrompts(are_read):
            runner.give_prompts(_leave if are_read else None)
        case msg.HandOver(every_token):
            runner.hand_over(StateReads(every_token=every_token))
        case msg.Rebalance():
            if runner.balancer is not None:
                runner.balancer.rebalance()
        case msg.ShareQueries():
            share_queries(runner.model, runner.pool.cache)
        case msg.FetchPages() | msg.LetGo():
            tiers.obey(order)
        case msg.OpenTiers(mark):
            with beating(say.link, say):
                trouble = tiers.open(mark, say)
            say(msg.TiersOpen(trouble))
        case msg.CloseTiers(seconds):
            tiers.close(seconds)
            say(msg.TiersClosed())
        case msg.PutAdapter(number, path):
            runner.adapters.put(number, path)
        case msg.DropAdapter(number):
            runner.adapters.drop(number)
        case msg.SaveAdapter(number):
            runner.adapters.save(number)
        case msg.RestoreAdapter(number):
            runner.adapters.restore(number)
        case msg.ForgetAdapter(number):
            runner.adapters.forget(number)
        case _:
            raise AssertionError(f"got {order}, want a step")


def _leave(id: RequestId, start: int, hidden: Tensor, targets: Tensor) -> None:
    """Prompts are read on the first rank."""


if __name__ == "__main__":
    sys.exit(main())
