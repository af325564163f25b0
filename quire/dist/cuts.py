"""Cuts: which part of a tensor a rank keeps, as plain numbers.

No sum is ever split: ranks keep some *outputs* of a product and all of its inputs. So a result has
the bits that one rank alone would give it. `ranks.py` brings the parts together again. No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import NotSupported

# Kernels take widths that are multiples of this; any other width is one that torch computes. Parts
# of a width go the way that the whole would go.
GRAIN = 16
COARSE = (256, 128, 64, 32)


class Cut(NamedTuple):
    """[begin, end) of `total` neighbours."""

    begin: int
    end: int
    total: int

    @staticmethod
    def whole(total: int) -> Cut:
        return Cut(0, total, total)

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    def times(self, width: int) -> Cut:
        """The same, where each is `width` neighbours."""
        return Cut(self.begin * width, self.end * width, self.total * width)


class HeadCut(NamedTuple):
    """Heads of attention; several ranks may have the same key heads."""

    q: Cut
    kv: Cut


def shares(total: int, num_ranks: int) -> tuple[Cut, ...]:
    """One behind the other and as equal as can be, larger ones first.

    >>> [share.size for share in shares(8, 3)]
    [3, 3, 2]
    """
    each, more = divmod(total, num_ranks)
    borders = [rank * each + min(rank, more) for rank in range(num_ranks + 1)]
    return tuple(Cut(borders[i], borders[i + 1], total) for i in range(num_ranks))


def width_cuts(width: int, num_ranks: int, grain: int = GRAIN) -> tuple[Cut, ...]:
    """Of the outputs of a product. A width that has no whole grains for everybody is not cut:
    every rank computes all of it.

    >>> [cut.size for cut in width_cuts(80, 2)], [cut.size for cut in width_cuts(20, 2)]
    ([48, 32], [20, 20])
    """
    if width % grain or width < grain * num_ranks:
        return (Cut.whole(width),) * num_ranks
    return tuple(share.times(grain) for share in shares(width // grain, num_ranks))


def coarse_cuts(width: int, num_ranks: int) -> tuple[Cut, ...]:
    """The same of what is another product's inputs as well: neighbours among these often share a
    scale, so cuts lie as far apart as they can.

    >>> [cut.size for cut in coarse_cuts(640, 2)], [cut.size for cut in coarse_cuts(80, 2)]
    ([384, 256], [48, 32])
    """
    fits = (grain for grain in COARSE if width % grain == 0 and width >= grain * num_ranks)
    return width_cuts(width, num_ranks, next(fits, GRAIN))


def row_cuts(num_rows: int, num_ranks: int) -> tuple[Cut, ...]:
    """Of rows that are looked up or gathered and no more, so that any number will do.

    >>> [cut.size for cut in row_cuts(258, 2)]
    [144, 114]
    """
    grains = -(-num_rows // GRAIN)
    if grains < num_ranks:
        return (Cut.whole(num_rows),) * num_ranks
    cuts = [share.times(GRAIN) for share in shares(grains, num_ranks)]
    return tuple(Cut(cut.begin, min(cut.end, num_rows), num_rows) for cut in cuts)


def head_cuts(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadCut, ...]:
    """Key heads with their queries; where ranks outnumber key heads, some have the same one.

    >>> [(cut.q.size, cut.kv.begin) for cut in head_cuts(6, 2, 4)]
    [(2, 0), (1, 0), (2, 1), (1, 1)]
    """
    if num_ranks > num_heads:
        raise NotSupported(
            f"got {num_ranks} ranks for {num_heads} heads of attention, want at least a head for"
            f" each; use tensor_parallel_size={num_heads} or less"
        )
    each = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        return tuple(HeadCut(kv.times(each), kv) for kv in shares(num_kv_heads, num_ranks))
    made = []
    for head, sharers in enumerate(shares(num_ranks, num_kv_heads)):
        for own in shares(each, sharers.size):
            q = Cut(head * each + own.begin, head * each + own.end, num_heads)
            made.append(HeadCut(q, Cut(head, head + 1, num_kv_heads)))
    return tuple(made)
