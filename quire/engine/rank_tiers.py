"""Tiers of ranks that hold a model together: opened by all of them, or the disk by nobody.

Each rank keeps its own shares of pages in an equal part of the memory and of the disk. The first
one's folder is the one that was asked for; the others have folders of their own inside it. What a
share's bytes depend on, all ranks say before any folder is opened, so a folder of another group or
of another model on one machine is not read. `tiers/group_tiers.py` is what policy asks afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from quire.args_check import has_tiers
from quire.config import Decision, EngineArgs
from quire.engine import rank_messages as msg
from quire.engine.rank_group import RankGroup
from quire.engine.tier_identity import PageMakers, fingerprint, group_mark, share_mark
from quire.engine.tier_parts import (
    MEMO,
    TierParts,
    common_secret,
    disk_secret,
    disk_size,
    found,
    holds,
    no_disk,
    rooms_on_host,
    scribe,
)
from quire.errors import NotSupported, RankLost
from quire.kv.tier_index import Wanted
from quire.memory.sizing import size_text
from quire.memory.transfer import PageTransfer
from quire.request import RequestId
from quire.runner.runner import ModelRunner
from quire.tiers.answering import AnsweringTiers
from quire.tiers.disk import DiskShelf
from quire.tiers.group_tiers import Answer, GroupTiers
from quire.tiers.memory import MemoryShelf
from quire.tiers.segment import Sealer
from quire.tiers.tempo import Tempo
from quire.tiers.tiers import Tiers

PATIENCE_S = 10.0  # for a rank of an engine before us to give its folder back


class TierLink:
    """`tiers.group_tiers.Others`, for as long as the group holds this model."""

    def __init__(self, group: RankGroup) -> None:
        self._group, self._model = group, group.num_models

    def open(self, mark: bytes) -> None:
        """Raises RankLost, or NotSupported when somebody cannot have its folder."""
        self._group.tell(msg.OpenTiers(mark))
        opened = self._group.await_all(msg.TiersOpen, None)
        _check([report.trouble for report in opened])

    def fetch(self, number: int, owner: RequestId, wanted: Sequence[Wanted]) -> None:
        self._group.tell(msg.FetchPages(number, owner, tuple(wanted)))

    def let_go(self, owner: RequestId) -> None:
        self._group.tell(msg.LetGo(owner))

    def answers(self) -> list[Answer]:
        news = self._group.news()
        return [Answer(one.number, one.count) for one in news if isinstance(one, msg.Fetched)]

    def close(self, seconds: float) -> None:
        """The others write what is left, as far as there is time."""
        if not self._group.has_model or self._group.num_models != self._model:
            return
        with suppress(RankLost):
            self._group.tell(msg.CloseTiers(seconds))
            self._group.await_all(msg.TiersClosed, 4 * seconds)


def open_first(
    args: EngineArgs,
    made: PageMakers,
    runner: ModelRunner,
    decisions: list[Decision],
    group: RankGroup,
) -> TierParts:
    """On the rank that schedules, when all others have loaded."""
    if not has_tiers(args):
        return TierParts()
    whose = f" on each of {made.ranks.num_processes} ranks"
    limit, secret = _share(args.kv_host_memory or 0, made), common_secret(args)
    if limit:
        decisions.append(holds("kv host memory", limit, made.cache, whose))
    link, disk = TierLink(group), None
    if args.kv_disk:
        folder = Path(args.kv_disk).expanduser()
        try:
            secret, disk = _open_disks(args, made, folder, secret, link, group.ready)
        except (OSError, NotSupported) as error:
            decisions.append(no_disk(error))
        else:
            what = f"{folder}, {size_text(disk.limit)}{whose}"
            decisions.append(Decision("kv disk", what, found(disk)))
    if disk is None:
        link.open(b"")
        if not limit:
            return TierParts(None, secret)
    tiers = _tiers(limit, disk, runner)
    tiers.close_others = link.close
    shared = GroupTiers(tiers, link, group.size - 1, group.deadline_s)
    return TierParts(tiers, secret, PageTransfer(runner.pool, shared), shared)


def _open_disks(
    args: EngineArgs,
    made: PageMakers,
    folder: Path,
    secret: bytes | None,
    link: TierLink,
    ready: Sequence[msg.Ready],
) -> tuple[bytes, DiskShelf]:
    """Everybody's, ours first; ours is given back when somebody cannot have its own."""
    secret = disk_secret(folder, secret)
    own = fingerprint(made, args, folder / MEMO)
    _check([report.trouble for report in ready])
    mark = group_mark([own, *(report.mark for report in ready)])
    size = _share(disk_size(args), made)
    disk = DiskShelf(folder, size, share_mark(mark, own), Sealer(secret), scribe())
    try:
        link.open(mark)
    except BaseException:
        disk.close()
        raise
    return secret, disk


class OtherTiers:
    """The same on a rank behind the first: opened when it says so."""

    def __init__(self, args: EngineArgs, made: PageMakers, runner: ModelRunner) -> None:
        self._args, self._runner = args, runner
        self._limit = _share(args.kv_host_memory or 0, made)
        self._disk_size = _share(disk_size(args), made)
        self._folder = Path(args.kv_disk or "").expanduser() / f"rank-{made.ranks.process}"
        self.mark, self.trouble = b"", ""
        self._tiers: AnsweringTiers | None = None
        if args.kv_disk:
            try:
                disk_secret(self._folder)
                self.mark = fingerprint(made, args, self._folder / MEMO)
            except (OSError, NotSupported) as error:
                self.trouble = _said(made.ranks.process, error)
        self._process = made.ranks.process

    def open(self, group: bytes, tell: Callable[[msg.Report], None]) -> str:
        """`group`: the mark of all ranks; without one there is no disk. Returns why it cannot be
        had, and then nothing is open."""
        self.close(0.1)  # opened before, when somebody else could not have its folder
        disk = None
        if group:
            try:
                sealer = Sealer(disk_secret(self._folder))
                mark = share_mark(group, self.mark)
                place = self._folder, self._disk_size
                disk = DiskShelf(*place, mark, sealer, scribe(), PATIENCE_S)
            except (OSError, NotSupported) as error:
                return _said(self._process, error)
        tiers = _tiers(self._limit, disk, self._runner)
        self._tiers = AnsweringTiers(tiers, lambda answer: tell(msg.Fetched(*answer)))
        self._runner.transfer = PageTransfer(self._runner.pool, tiers)
        return ""

    def obey(self, order: msg.FetchPages | msg.LetGo) -> None:
        assert self._tiers is not None, f"got {order} before tiers were opened"
        if isinstance(order, msg.LetGo):
            self._tiers.let_go(order.owner)
        else:
            self._tiers.fetch(order.number, order.owner, order.wanted)

    def close(self, seconds: float) -> None:
        if self._tiers is not None:
            self._tiers.own.close(seconds)


def _share(total: int, made: PageMakers) -> int:
    return total // made.ranks.num_processes


def _tiers(limit: int, disk: DiskShelf | None, runner: ModelRunner) -> Tiers:
    node_bytes = len(runner.pool.groups) * runner.pool.page_bytes
    rooms = rooms_on_host(limit, disk is not None, node_bytes)
    return Tiers(MemoryShelf(limit), disk, Tempo(), node_bytes, rooms=rooms)


def _said(process: int, error: Exception) -> str:
    return f"rank {process}: {error}"


def _check(troubles: Sequence[str]) -> None:
    if said := [trouble for trouble in troubles if trouble]:
        raise NotSupported("; ".join(said))
