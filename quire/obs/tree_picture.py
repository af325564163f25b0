"""TreePicture: the prefix tree with its long chains folded, small enough to draw.

A node of the tree is one page of tokens; a run of nodes with one child each and equal hit counts is
folded into one segment. A tree of up to `SLICE` pages is scanned at each look. A larger one is
scanned in slices, one a look, and the last finished scan is shown meanwhile: hit counts and holders
are read fresh, only the folding may be some looks old. It reads the tree and never writes it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from quire.kv.lookup import ITEM
from quire.kv.manager import KVManager
from quire.kv.prefix import Node

MAX_SEGMENTS = 200
MAX_HEAD_TOKENS = 24
SLICE = 1024  # nodes scanned in one look, less than half a millisecond

TreeRow = dict[str, int | list[int]]


@dataclass(slots=True, eq=False)
class Segment:
    """A run of nodes shown as one."""

    nodes: list[Node]  # the first few: the head, and as many as its shown tokens need
    parent: Segment | None
    pages: int = 1
    shown: list[int] | None = None  # first token ids, made when first asked for

    @property
    def head(self) -> Node:
        return self.nodes[0]


class Scan:
    """One pass over the nodes there were when it began, parents before children.

    The tree's dictionary keeps the order of insertion, and a node can neither be inserted before
    its parent nor outlive it: so a parent's segment is always known.
    """

    def __init__(self, kv: KVManager) -> None:
        self._rest: Iterator[Node] = iter(list(kv.tree.nodes.values()))
        self._segment_of: dict[Node, Segment] = {}
        self._by_hits: dict[int, deque[Segment]] = {}
        self._head_nodes = -(-MAX_HEAD_TOKENS // kv.page_size)

    def advance(self, count: int) -> bool:
        """Look at `count` more nodes; True when all are done."""
        segment_of, head_nodes, num_seen = self._segment_of, self._head_nodes, 0
        for node in islice(self._rest, count):
            num_seen += 1
            parent = node.parent
            above = segment_of.get(parent) if parent is not None else None
            if (
                parent is None
                or above is None
                or parent.num_children != 1
                or parent.num_hits != node.num_hits
            ):
                segment_of[node] = self._begin(node, above)
                continue
            if above.pages < head_nodes:
                above.nodes.append(node)
            above.pages += 1
            segment_of[node] = above
        return num_seen < count

    def _begin(self, node: Node, above: Segment | None) -> Segment:
        segment = Segment([node], above)
        alike = self._by_hits.get(node.num_hits)
        if alike is None:
            alike = self._by_hits[node.num_hits] = deque(maxlen=MAX_SEGMENTS)
        alike.append(segment)  # the newest of those with equal hits stay
        return segment

    def best(self) -> list[Segment]:
        """At most MAX_SEGMENTS: most hits first, then newest, each after its ancestors."""
        chosen: dict[Segment, None] = {}
        for hits in sorted(self._by_hits, reverse=True):
            for segment in reversed(self._by_hits[hits]):
                for ancestor in reversed(_path(segment, chosen)):
                    if len(chosen) == MAX_SEGMENTS:
                        return list(chosen)
                    chosen[ancestor] = None
        return list(chosen)


def _path(segment: Segment | None, chosen: dict[Segment, None]) -> list[Segment]:
    """The segment and those of its ancestors that are not chosen yet, deepest first."""
    path: list[Segment] = []
    while segment is not None and segment not in chosen:
        path.append(segment)
        segment = segment.parent
    return path


class TreePicture:
    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._scan: Scan | None = None
        self._shown: list[Segment] = []
        self._has_finished = False

    def rows(self) -> list[TreeRow]:
        """Segments as plain data, parents first; ids stay the same while a segment's head lives."""
        scan = self._scan or Scan(self._kv)
        done = scan.advance(SLICE)
        self._scan = None if done else scan
        if done or not self._has_finished:  # half a first scan is better than nothing
            self._shown = scan.best()
        self._has_finished |= done
        nodes = self._kv.tree.nodes
        return [self._row(s) for s in self._shown if nodes.get(s.head.key) is s.head]

    def _row(self, segment: Segment) -> TreeRow:
        head = segment.head
        if segment.shown is None:
            tokens = b"".join(node.tokens for node in segment.nodes)
            segment.shown = array("i", tokens[: MAX_HEAD_TOKENS * ITEM]).tolist()
        refs = self._kv.allocator.refs
        return {
            "id": head.number,  # never 0: that is the root's here
            "parent": segment.parent.head.number if segment.parent else 0,
            "pages": segment.pages,
            "tokens": segment.pages * self._kv.page_size,
            "hits": head.num_hits,
            "live": max(refs[page] for page in head.pages),  # nobody holds a page that is gone
            "head": segment.shown,
        }
