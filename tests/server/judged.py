"""A server with a cache of answers whose engine is told what it thinks of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2

from quire.answers.bound import Seen
from quire.answers.entries import Entries, Keeping
from quire.engine.commands import About
from quire.request import Request
from quire.server.answer_cache import AnswerCache
from quire.server.link import Tap
from quire.server.shelf import Shelf
from quire.step import TokenEvent, TokenLogprobs
from tests.server.fakes import Bench, FakeLink, chat_tokenizer

CHAT, GREEDY = "/v1/chat/completions", {"temperature": 0}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class JudgingLink(FakeLink):
    """Judges answers behind a prompt: `gap` nats behind the best, but for those it would say."""

    gap = 3.0
    num_probes = 0

    async def _feed(self, request: Request, tap: Tap) -> None:
        if request.params.prompt_logprobs is None:
            return await super()._feed(request, tap)
        self.num_probes += 1
        ids = self.tokenizer.encode(self.answer, add_special_tokens=False)
        tokens = request.tokens.tolist()
        is_mine = tokens[-len(ids) :] == ids
        records = [self._record(token, is_mine) for token in tokens[1:]]
        tap.about[request.id] = About(request.id, 0, "", 0, 0.1, 0.2, 0.3)
        end = self.tokenizer.eos_ids[0]
        last = TokenLogprobs(end, -0.1, 1, (end,), (-0.1,))
        tap.put(TokenEvent(request.id, [end], "length", None, (last,), records, 0))
        return None

    def _record(self, token: int, is_mine: bool) -> TokenLogprobs:
        if is_mine:
            return TokenLogprobs(token, -0.1, 1, (token,), (-0.1,))
        return TokenLogprobs(token, -0.1 - self.gap, 2, (token + 1,), (-0.1,))


def make(folder: Path, mode: str, **settings: Any) -> Bench:
    bench = Bench(answer_cache=mode, **settings)
    link = JudgingLink(chat_tokenizer())
    link.on_hello = bench.link.on_hello
    bench.link = link
    bench.server.link = link  # type: ignore[assignment]
    link.greet()
    bench.server.shelf = Shelf(folder)
    entries = Entries(bench.server.shelf.database, Keeping(100, 1 << 30, 1_000))
    bench.server.answers = AnswerCache(bench.server, entries, max_error=0.05)
    return bench


async def ask(bench: Bench, text: str, key: str = "alice", **fields: Any) -> httpx2.Response:
    path = fields.pop("path", CHAT)
    body = {"messages": [{"role": "user", "content": text}], **GREEDY, **fields}
    reply = await bench.send(path, body, authorization=f"Bearer {key}")
    assert reply.status_code == 200, reply.text
    assert bench.server.answers is not None
    await bench.server.answers.flush()
    return reply


def text_of(reply: httpx2.Response) -> str:
    return str(reply.json()["choices"][0]["message"]["content"])


def how(reply: httpx2.Response) -> str:
    return reply.headers.get("x-quire-cache", "").split(";")[0]


def link_of(bench: Bench) -> JudgingLink:
    assert isinstance(bench.link, JudgingLink)
    return bench.link


async def keys(bench: Bench) -> list[bytes]:
    assert bench.server.shelf is not None
    rows = await bench.server.shelf.database.call(
        lambda db: db.execute("SELECT key FROM answers ORDER BY number").fetchall()
    )
    return [row["key"] for row in rows]


async def observe(bench: Bench, key: bytes, seen: list[Seen]) -> None:
    answers, shelf = bench.server.answers, bench.server.shelf
    assert answers is not None and shelf is not None
    caller = bench.server.keys.caller({"authorization": "Bearer alice"})
    assert caller is not None
    for one in seen:
        answers._write(lambda db, one=one: answers.entries.observe(db, caller.salt, key, one))
    await answers.flush()
