"""Where the keys of a draft lie that is part of a tree: in the places that its path names.

Drafts of a tree lie one behind the other, so behind the root a key's place is not its position. The
kernels walk positions as ever. `Batch.paths` gives the place of each, so sums are those of a chain,
and no draft reads what a sibling left. A row of paths is how many drafts lead to a token, itself
included, and their places; -1 first is a token of no tree. PATH is the width of a row; with 0 there
are no trees, and kernels are compiled as if there never were any.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _root(path, end):
    """The newest position whose key lies where it says."""
    num = tl.load(path)
    return tl.where(num < 0, end, end - 1 - num)


@triton.jit
def walked(pages, paths, token, end, PATH: tl.constexpr):
    """What `place_of` finds keys by, for queries from `token` on whose last position is end - 1.

    `pages` is their row of the page table. A token of a tree is a tile of its own."""
    path = paths + token.to(tl.int64) * PATH
    return (pages, path, _root(path, end)) if PATH > 0 else (pages,)


@triton.jit
def place_of(pages, n, live):
    """The places of the keys at positions n; what is not live is anybody's."""
    if len(pages) == 1:
        place = n
    else:
        listed = tl.load(pages[1] + (n - pages[2]), mask=live & (n > pages[2]), other=0)
        place = tl.where(n > pages[2], listed, n)
    return place


@triton.jit
def plain_end(context_lens, paths, seq, live, PATH: tl.constexpr):
    """How many keys of decodes `seq` lie where their positions say, 0 where not live."""
    end = tl.load(context_lens + seq, mask=live, other=0)
    if PATH > 0:
        end -= tl.maximum(tl.load(paths + seq.to(tl.int64) * PATH, mask=live, other=0), 0)
    return end
