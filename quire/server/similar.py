"""Similar: which of a caller's entries are like what it asks now.

By words first, which costs nothing. Unless they find nearly the same text, the model's embedding of
the last message is looked up too: it finds questions that share no word. Each caller has indexes of
its own, and nothing that is done for one depends on another's entries. `answer_cache.py` decides
what becomes of what is found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.answers.entries import Entries, Entry
from quire.answers.features import Vector
from quire.answers.index import Candidate, SimilarIndex
from quire.server.embedder import Embedder

if TYPE_CHECKING:
    from quire.request import Request
    from quire.server.server import Server

WORDS, MODEL = "words", "model"
SURE = 0.85  # similarity of words from which no embedding is asked for
# Held in memory; a caller has two at most, so none can push out more of others' than two. What was
# pushed out is read from the store again, which takes longer and tells nobody what is in it.
MAX_INDEXES = 128
LARGE_INDEX = 500


@dataclass(slots=True)
class Wanted:
    """What is looked for, and for whom."""

    tenant: str
    text: str
    frame: bytes
    words: Vector
    asker: Request
    embedding: Vector | None = None  # once it was asked for


class Found(NamedTuple):
    entry: Entry
    similarity: float
    by: str  # WORDS or MODEL

    @property
    def note(self) -> str:
        by = "; by=model" if self.by == MODEL else ""
        return f"similarity={self.similarity:.2f}{by}"


class Least(NamedTuple):
    """Similarities below which an entry is of no use."""

    words: float
    model: float


class Similar:
    def __init__(self, server: Server, entries: Entries, model: Callable[[], bytes]) -> None:
        """`model`: everything that answers depend on besides requests."""
        self.server, self.entries, self._model = server, entries, model
        self.embedder = Embedder(server)
        self._indexes: OrderedDict[tuple[str, bytes], SimilarIndex] = OrderedDict()
        self.num_lookups = 0  # searches of an index

    async def nearest(self, wanted: Wanted, count: int, least: Least) -> list[Found]:
        """Entries that are like it, best first."""
        found = await self._by_words(wanted, count, least, is_framed=False)
        if not found or found[0].similarity < SURE:
            known = {one.entry.key for one in found}
            others = await self._by_model(wanted, count, least, is_framed=False)
            found += [one for one in others if one.entry.key not in known]
        return found[:count]

    async def framed(self, wanted: Wanted, least: Least) -> Found | None:
        """The entry most like it of those where all but the last message is equal."""
        found = await self._by_words(wanted, 1, least, is_framed=True)
        found = found or await self._by_model(wanted, 1, least, is_framed=True)
        return found[0] if found else None

    # ------------------------------------------------------------ one index

    async def _by_words(
        self, wanted: Wanted, count: int, least: Least, *, is_framed: bool
    ) -> list[Found]:
        index = await self._index(wanted.tenant, b"")
        candidates = await self._search(index, wanted.words, wanted, 0 if is_framed else count)
        return await self._read(candidates, index, wanted, least.words, WORDS)

    async def _by_model(
        self, wanted: Wanted, count: int, least: Least, *, is_framed: bool
    ) -> list[Found]:
        embedder = self.embedder
        if embedder.scale is None:
            return []
        index = await self._index(wanted.tenant, embedder.fingerprint)
        if not len(index):
            return []  # nothing of this caller's to compare with
        if wanted.embedding is None:
            wanted.embedding = await embedder.embed(wanted.text, wanted.asker)
        if wanted.embedding is None:
            return []
        candidates = await self._search(index, wanted.embedding, wanted, 0 if is_framed else count)
        return await self._read(candidates, index, wanted, least.model, MODEL)

    async def _search(
        self, index: SimilarIndex, vector: Vector, wanted: Wanted, count: int
    ) -> list[Candidate]:
        """`count` 0: the one that was asked likewise."""
        self.num_lookups += 1

        def look() -> list[Candidate]:
            if count == 0:
                return index.nearest_framed(vector, wanted.frame)
            return index.nearest(vector, wanted.frame, count)

        return await self.server.in_thread(look, 1 << 30 if len(index) > LARGE_INDEX else 0)

    async def _read(
        self,
        candidates: list[Candidate],
        index: SimilarIndex,
        wanted: Wanted,
        least: float,
        by: str,
    ) -> list[Found]:
        found: list[Found] = []
        for candidate in candidates:
            if candidate.similarity < least:
                continue
            entry = await self.entries.get(wanted.tenant, candidate.key)
            if entry is not None:
                found.append(Found(entry, candidate.similarity, by))
            else:
                index.remove(candidate.key)  # another process, or age, took it
        return found

    async def _index(self, tenant: str, embedder: bytes) -> SimilarIndex:
        """With everything that is stored by now; no embedder: by words."""
        place = (tenant, embedder)
        index = self._indexes.setdefault(place, SimilarIndex())
        self._indexes.move_to_end(place)
        if len(self._indexes) > MAX_INDEXES:
            self._indexes.popitem(last=False)
        index.add(await self.entries.since(tenant, self._model(), index.last_number, embedder))
        return index
