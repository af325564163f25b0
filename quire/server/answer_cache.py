"""AnswerCache: answers given before, as answers, or as drafts of new ones. For each key its own.

Three ways to use an entry, each more daring. *exact*: the same tokens with the same settings and
seed have the same answer, for the engine is deterministic. *draft*: a similar request's answer goes
along as a hint (`spec/hint.py`); the output is what it would be without, only sooner. *answer*: a
similar request's answer is given, if one prefill shows that the model would say just that, or if
the bound on the error that this entry has earned (`answers/bound.py`) is below what was allowed.
What was used is in the header `x-quire-cache`. `cache_wish.py` says what requests may ask.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from quire.answers.bound import Seen, error_bound
from quire.answers.entries import Entries, Entry, Keeping, NewEntry
from quire.answers.features import Vector, anchors, features, says_the_same
from quire.answers.index import Candidate, SimilarIndex
from quire.obs.log import log_event
from quire.server.cache_probe import gap_of
from quire.server.cache_wish import ANSWER, EXACT, OFF, settings_bytes
from quire.server.link import Tap
from quire.step import TokenEvent
from quire.version import __version__

if TYPE_CHECKING:
    from quire.server.generation import Generation
    from quire.server.server import Server

DRAFT_FROM = 0.4  # similarity; below it a hint is a waste of guesses
ANSWER_FROM = 0.6  # below it no prefill is spent on a candidate
MAX_INDEXES = 64  # keys whose entries are held in memory
LARGE_INDEX = 500
NUM_HINTS, MAX_HINT = 3, 8_192  # entries that make one hint, and its tokens
FRAMED = 0
HEADER = b"x-quire-cache"


@dataclass(slots=True)
class Looked:
    """What was found out about one request."""

    key: bytes
    features: Vector | None = None
    rival: Entry | None = None  # was judged and not given
    gap: float = 0.0
    is_given: bool = False


class AnswerCache:
    def __init__(self, server: Server, entries: Entries, max_error: float) -> None:
        self.server, self.entries, self.max_error = server, entries, max_error
        self._indexes: OrderedDict[str, SimilarIndex] = OrderedDict()
        self._pending: list[Callable[[sqlite3.Connection], None]] = []
        self._writing: asyncio.Task[None] | None = None
        self._identity = b""

    # ------------------------------------------------------------ before

    async def look(self, generation: Generation) -> Tap | None:
        """Where to read the answer from, if it is here; else the request may have got a hint."""
        try:
            return await self._look(generation)
        except (sqlite3.Error, OSError) as error:  # a request does not fail for want of a cache
            log_event("answers_not_read", severity=logging.ERROR, reason=str(error))
            return None

    async def _look(self, generation: Generation) -> Tap | None:
        wish = generation.job.cache
        if wish is None or not _is_plain(generation):
            return None
        looked = generation.looked = Looked(self._key(generation, wish.model))
        if _repeats(generation):
            entry = await self.entries.get(_tenant(generation), looked.key)
            if entry is not None:
                return self._give(generation, looked, entry, EXACT)
        if wish.text:
            looked.features = features(wish.text)
        if wish.mode == EXACT or looked.features is None:
            self._tell(generation, "miss")
            return None
        if wish.mode == ANSWER and wish.may_answer and _is_provable(generation):
            tap = await self._judge(generation, looked)
            if tap is not None:
                return tap
        await self._hint(generation, looked)
        return None

    async def _hint(self, generation: Generation, looked: Looked) -> None:
        found = await self._nearest(generation, looked, NUM_HINTS)
        similar = [(entry, one) for entry, one in found if one.similarity >= DRAFT_FROM]
        if not similar:
            self._tell(generation, "miss")
            return
        # One behind another: where the output leaves the first, it may go on like a later one.
        hint = tuple(token for entry, _ in similar for token in entry.tokens)
        generation.requests[0].hint = (generation.job.hint + hint)[:MAX_HINT]
        self._tell(generation, "draft", f"similarity={similar[0][1].similarity:.2f}")

    async def _judge(self, generation: Generation, looked: Looked) -> Tap | None:
        """One prefill of the cached answer behind the new prompt."""
        wish = generation.job.cache
        assert wish is not None
        found = await self._nearest(generation, looked, FRAMED)
        if not found or found[0][1].similarity < ANSWER_FROM:
            return None
        entry, candidate = found[0]
        gap = await gap_of(entry, generation)
        if gap is None:
            return None
        near = f"similarity={candidate.similarity:.2f}"
        if gap == 0.0:
            return self._give(generation, looked, entry, "proved", near)
        if anchors(wish.text) != anchors(entry.text):
            return None
        bound = error_bound(entry.seen, gap)
        if bound <= self.max_error:
            return self._give(generation, looked, entry, ANSWER, f"error<={bound:.3f}; {near}")
        looked.rival, looked.gap = entry, gap  # the answer that is made now will judge it
        return None

    def _give(
        self, generation: Generation, looked: Looked, entry: Entry, how: str, note: str = ""
    ) -> Tap:
        looked.is_given = True
        tenant = _tenant(generation)
        self._write(lambda db: self.entries.used(db, tenant, entry.key))
        self._tell(generation, how, note)
        tap = Tap()
        id = generation.requests[0].id
        tap.put(TokenEvent(id, entry.tokens, entry.finish, entry.stop_reason))
        return tap

    def _tell(self, generation: Generation, how: str, note: str = "") -> None:
        self.server.metrics.answer_cache(how)
        text = f"{how}; {note}" if note else how
        generation.http.answer_headers.append((HEADER, text.encode("ascii")))

    # ------------------------------------------------------------ after

    def learn(self, generation: Generation) -> None:
        """An answer was made: it may be given again, and it judges the one that was not."""
        looked, wish = generation.looked, generation.job.cache
        if looked is None or wish is None or looked.is_given:
            return
        (answer,) = generation.conversation.answers.values()
        output, tenant = answer.output, _tenant(generation)
        is_by_text = isinstance(output.stop_reason, str)
        text = output.text
        new = NewEntry(
            tenant=tenant,
            key=looked.key,
            model=self._model(),
            frame=wish.frame,
            text=wish.text if looked.features is not None else "",
            features=features("") if looked.features is None else looked.features,
            answer=text,
            tokens=output.token_ids,
            finish=None if is_by_text else output.finish_reason,
            stop_reason=None if is_by_text else output.stop_reason,
        )
        self._write(lambda db: self.entries.put(db, new))
        if (rival := looked.rival) is not None:
            seen = Seen(looked.gap, says_the_same(rival.answer, text))
            self._write(lambda db: self.entries.observe(db, tenant, rival.key, seen))

    def _write(self, work: Callable[[sqlite3.Connection], None]) -> None:
        self._pending.append(work)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self.flush())

    async def flush(self) -> None:
        """What came while the last was written goes to the disk together."""
        while self._pending:
            works, self._pending = self._pending, []

            def write(db: sqlite3.Connection, works: list[Work] = works) -> None:
                for work in works:
                    work(db)

            try:
                await self.entries.database.call(write)
            except (sqlite3.Error, OSError) as error:  # a cache: nobody misses what is not in it
                log_event("answers_not_kept", severity=logging.ERROR, reason=str(error))

    # ------------------------------------------------------------ finding

    async def _nearest(
        self, generation: Generation, looked: Looked, count: int
    ) -> list[tuple[Entry, Candidate]]:
        """Entries that are like the request, best first; FRAMED: one that was asked likewise."""
        wish, tenant = generation.job.cache, _tenant(generation)
        assert wish is not None and looked.features is not None
        index, vector, frame = await self._index(tenant), looked.features, wish.frame

        def look() -> list[Candidate]:
            if count == FRAMED:
                return index.nearest_framed(vector, frame)
            return index.nearest(vector, frame, count)

        found: list[tuple[Entry, Candidate]] = []
        size = 1 << 30 if len(index) > LARGE_INDEX else 0
        for candidate in await self.server.in_thread(look, size):
            entry = await self.entries.get(tenant, candidate.key)
            if entry is not None:
                found.append((entry, candidate))
            else:
                index.remove(candidate.key)  # another process, or age, took it
        return found

    async def _index(self, tenant: str) -> SimilarIndex:
        """With everything that is stored by now."""
        index = self._indexes.setdefault(tenant, SimilarIndex())
        self._indexes.move_to_end(tenant)
        if len(self._indexes) > MAX_INDEXES:
            self._indexes.popitem(last=False)
        index.add(await self.entries.since(tenant, self._model(), index.last_number))
        return index

    def _model(self) -> bytes:
        """Everything the engine's answers depend on that is not in a request."""
        if not self._identity:
            server = self.server
            digest = server.card.digest if server.card is not None else ""
            told = [server.settings.engine, digest, __version__]
            self._identity = sha256(msgspec.json.encode(told, order="sorted")).digest()
        return self._identity

    def _key(self, generation: Generation, model: str) -> bytes:
        adapter = self.server.link.adapters.get(generation.http.adapter)
        request, params = generation.requests[0], generation.job.params
        seed = "greedy" if params.is_greedy else "drawn" if params.seed is None else params.seed
        prompt = request.tokens[: request.num_prompt].tobytes()
        rest = (settings_bytes(request.params), seed, request.max_tokens, sorted(request.eos_ids))
        # Of answers that were judged before they were given, those by another judgement differ.
        judged = () if generation.gate is None else astuple(generation.gate)
        who = (model, adapter.digest if adapter is not None else b"", judged)
        return sha256(self._model() + msgspec.msgpack.encode((*who, prompt, *rest))).digest()


Work = Callable[[sqlite3.Connection], None]


def cache_of(server: Server) -> AnswerCache | None:
    """As the settings want it; None: every answer is made anew."""
    limits, shelf = server.limits, server.shelf
    if shelf is None or server.settings.answer_cache == OFF:
        return None
    entries = Entries(shelf.database, Keeping(limits.max_cached_answers_per_key, limits.stored_s))
    return AnswerCache(server, entries, server.settings.answer_cache_error)


def _tenant(generation: Generation) -> str:
    caller = generation.http.caller
    return caller.salt if caller is not None else ""


def _is_plain(generation: Generation) -> bool:
    """One answer whose tokens are all there is to it."""
    params = generation.job.params
    wants_more = params.logprobs is not None or params.prompt_logprobs is not None
    return len(generation.requests) == 1 and not wants_more and params.pooling is None


def _repeats(generation: Generation) -> bool:
    params = generation.job.params
    return params.is_greedy or params.seed is not None


def _is_provable(generation: Generation) -> bool:
    """The most likely token is what would be drawn: nothing else has a say in it."""
    params = generation.requests[0].params
    others = (params.logit_bias, params.allowed_token_ids, params.bad_words, params.min_tokens)
    has_say = params.has_penalties or any(others) or params.structured_outputs is not None
    return params.is_greedy and not has_say
