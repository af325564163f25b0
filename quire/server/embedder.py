"""Embedder: what the served model makes of a text, for finding similar ones.

A text is a pooling request of its own, as at `/v1/embeddings`, under its caller's salt. What is
usual for the model is learned once, from sentences that are the same everywhere, before anybody
asks: nothing here depends on what callers said. Where there is no embedding (a long text, no room
in time, an engine that cannot pool) the words of the text have to do.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.answers.embed import REFERENCES, Scale
from quire.answers.features import Vector
from quire.errors import EngineDead, QuireError
from quire.obs.log import log_event
from quire.params import SamplingParams
from quire.request import BACKGROUND, Request

if TYPE_CHECKING:
    from quire.server.server import Server

MAX_TOKENS = 512  # of a text that is read
PATIENCE_S = 5.0  # a text that has to wait longer goes by its words
POLL_S = 0.5
CHUNK = 8  # references in the engine at once


class Embedder:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.scale: Scale | None = None  # None: there are no embeddings yet, or never
        self.fingerprint = b""  # of the scale
        self.num_read = 0  # texts, references too

    async def run(self) -> None:
        """As long as the process: learn what is usual as soon as there is an engine."""
        while self.scale is None:
            if self.server.link.can_step:
                try:
                    await self.learn()
                except QuireError as error:
                    if not isinstance(error, EngineDead):  # it will not get better
                        log_event("answers_by_words_alone", reason=str(error))
                        break
            await asyncio.sleep(POLL_S)
        await asyncio.Event().wait()

    async def learn(self) -> None:
        """Raises QuireError where the engine cannot pool."""
        found: list[list[float]] = []
        for at in range(0, len(REFERENCES), CHUNK):
            texts = REFERENCES[at : at + CHUNK]
            found += await asyncio.gather(*(self._pooled(text, None) for text in texts))
        self.scale = Scale.of(found)
        self.fingerprint = self.scale.digest

    async def embed(self, text: str, asker: Request, is_later: bool = False) -> Vector | None:
        """`is_later`: nobody waits for it."""
        if self.scale is None or len(text) > 8 * MAX_TOKENS:
            return None
        with suppress(TimeoutError, QuireError):
            async with asyncio.timeout(None if is_later else PATIENCE_S):
                return self.scale.embedding(await self._pooled(text, asker, is_later))
        return None

    async def _pooled(self, text: str, asker: Request | None, is_later: bool = True) -> list[float]:
        server = self.server
        ids = await server.encode(text, "messages")
        prompt = {
            "prompt_token_ids": ids[:MAX_TOKENS],
            "cache_salt": asker.cache_salt if asker is not None else "",
        }
        params = SamplingParams(max_tokens=1, pooling="mean", detokenize=False)
        priority = BACKGROUND if is_later or asker is None else asker.priority
        _, (request,) = server.intake.requests(prompt, params, priority)
        if asker is not None:
            request.tenant, request.weight = asker.tenant, asker.weight
        self.num_read += 1
        tap = server.link.open([request], is_background=is_later)
        try:
            while True:
                for event in await tap.take():
                    if event.finish == "error" or (event.finish and not event.pooled):
                        raise QuireError(event.error or "the engine gave no embedding")
                    if event.pooled:
                        return list(event.pooled)
        finally:
            server.link.close([request.id])
