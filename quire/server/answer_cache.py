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
from collections.abc import Callable, Coroutine
from dataclasses import astuple, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from quire.answers.bound import Seen, error_bound
from quire.answers.entries import Entries, Entry, Keeping, NewEntry
from quire.answers.features import features
from quire.answers.sameness import says_the_same
from quire.obs.log import log_event
from quire.server.cache_probe import gap_of
from quire.server.cache_wish import ANSWER, EXACT, OFF, settings_bytes
from quire.server.link import Tap
from quire.server.similar import SURE, WORDS, Least, Similar, Wanted
from quire.step import TokenEvent
from quire.version import __version__

if TYPE_CHECKING:
    from quire.server.generation import Generation
    from quire.server.server import Server

DRAFT_FROM = Least(words=0.4, model=0.3)  # below it a hint is a waste of guesses
ANSWER_FROM = Least(words=0.6, model=0.35)  # below it no prefill is spent on a candidate
NUM_HINTS, MAX_HINT = 3, 8_192  # entries that make one hint, and its tokens
HEADER = b"x-quire-cache"


@dataclass(slots=True)
class Looked:
    """What was found out about one request."""

    key: bytes
    wanted: Wanted | None = None
    is_known: bool = False  # an entry has nearly the same words
    rival: Entry | None = None  # was judged and not given
    gap: float = 0.0
    is_given: bool = False


class AnswerCache:
    def __init__(self, server: Server, entries: Entries, max_error: float) -> None:
        self.server, self.entries, self.max_error = server, entries, max_error
        self.similar = Similar(server, entries, self._model)
        self._pending: list[Callable[[sqlite3.Connection], None]] = []
        self._writing: asyncio.Task[None] | None = None
        self._keeping: set[asyncio.Task[None]] = set()
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
        tenant = _tenant(generation)
        if _repeats(generation):
            entry = await self.entries.get(tenant, looked.key)
            if entry is not None:
                return self._give(generation, looked, entry, EXACT)
        if wish.text:
            words = features(wish.text)
            asker = generation.requests[0]
            looked.wanted = Wanted(tenant, wish.text, wish.frame, words, asker)
        if wish.mode == EXACT or looked.wanted is None:
            self._tell(generation, "miss")
            return None
        if wish.mode == ANSWER and wish.may_answer and _is_provable(generation):
            tap = await self._judge(generation, looked, looked.wanted)
            if tap is not None:
                return tap
        await self._hint(generation, looked, looked.wanted)
        return None

    async def _hint(self, generation: Generation, looked: Looked, wanted: Wanted) -> None:
        found = await self.similar.nearest(wanted, NUM_HINTS, DRAFT_FROM)
        looked.is_known = bool(found) and found[0].by == WORDS and found[0].similarity >= SURE
        if not found:
            self._tell(generation, "miss")
            return
        # One behind another: where the output leaves the first, it may go on like a later one.
        hint = tuple(token for one in found for token in one.entry.tokens)
        generation.requests[0].hint = (generation.job.hint + hint)[:MAX_HINT]
        self._tell(generation, "draft", found[0].note)

    async def _judge(self, generation: Generation, looked: Looked, wanted: Wanted) -> Tap | None:
        """One prefill of the cached answer behind the new prompt."""
        found = await self.similar.framed(wanted, ANSWER_FROM)
        if found is None:
            return None
        entry = found.entry
        gap = await gap_of(entry, generation)
        if gap is None:
            return None
        if gap == 0.0:
            return self._give(generation, looked, entry, "proved", found.note)
        wish = generation.job.cache
        if wish is None or not wish.asks_as(entry.text):
            return None
        bound = error_bound(entry.seen, gap)
        if bound <= self.max_error:
            note = f"error<={bound:.3f}; {found.note}"
            return self._give(generation, looked, entry, ANSWER, note)
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
        wanted = looked.wanted
        new = NewEntry(
            tenant=tenant,
            key=looked.key,
            model=self._model(),
            frame=wish.frame,
            text=wish.text if wanted is not None else "",
            features=features("") if wanted is None else wanted.words,
            answer=text,
            tokens=output.token_ids,
            finish=None if is_by_text else output.finish_reason,
            stop_reason=None if is_by_text else output.stop_reason,
        )
        self._write(lambda db: self.entries.put(db, new))
        if wanted is not None and wish.mode != EXACT and not looked.is_known:
            self._later(self._embed(new, wanted))
        if (rival := looked.rival) is not None:
            seen = Seen(looked.gap, says_the_same(rival.answer, text))
            self._write(lambda db: self.entries.observe(db, tenant, rival.key, seen))

    async def _embed(self, new: NewEntry, wanted: Wanted) -> None:
        """So that it is found by questions that share no word with it."""
        embedder, vector = self.similar.embedder, wanted.embedding
        if vector is None:
            vector = await embedder.embed(wanted.text, wanted.asker, is_later=True)
        if vector is not None:
            found, who = vector, embedder.fingerprint
            self._write(lambda db: self.entries.embed(db, new, who, found))

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    def _write(self, work: Callable[[sqlite3.Connection], None]) -> None:
        self._pending.append(work)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_pending())

    async def flush(self) -> None:
        """All that was learned by now is on the disk."""
        while self._keeping:
            await asyncio.gather(*self._keeping, return_exceptions=True)
        if self._writing is not None:
            await self._writing

    async def _write_pending(self) -> None:
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

    # ------------------------------------------------------------ keys

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
    most = (limits.max_cached_answers_per_key, limits.max_stored_bytes_per_key)
    entries = Entries(shelf.database, Keeping(*most, limits.stored_s))
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
