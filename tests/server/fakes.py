"""A server without an engine: the real app and tokenizer, and a link that says what it is told."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import httpx2

from quire.config import EngineArgs
from quire.engine.commands import About, AdapterInfo, Hello
from quire.errors import EngineDead
from quire.grammar.spec import check_limits
from quire.load.card import ModelCard
from quire.models.sequence_head import Verdict
from quire.params import StructuredOutputsParams
from quire.request import Request
from quire.server.app import App
from quire.server.link import Tap
from quire.server.routes import routes
from quire.server.server import Server
from quire.server.settings import ServeSettings
from quire.step import TokenEvent, TokenLogprobs
from quire.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_level

if TYPE_CHECKING:
    from quire.grammar.checker import GrammarChecker
    from quire.server.link import EngineLink

MODEL = "tiny"
MAX_MODEL_LEN = 16_384
# Knows tools in Hermes form, and thinks unless told not to.
CHAT_TEMPLATE = (
    """{% if tools %}<s>tools: {{ tools | tojson }} {"name": ..., "arguments": ...}|{% endif %}"""
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
    "{% if m.reasoning_content %} (thought {{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} for {{ m.tool_call_id }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: "
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


@cache
def chat_tokenizer(template: str = CHAT_TEMPLATE) -> Tokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    with tempfile.TemporaryDirectory() as folder:
        byte_level().save(f"{folder}/tokenizer.json")
        config = Path(folder, "tokenizer_config.json")
        config.write_text(json.dumps({**special, "chat_template": template}))
        return Tokenizer.from_folder(folder)


class FakeLink:
    """Stands in for EngineLink; every request is answered with `answer`, a token at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.answer = "Hello there."
        self.num_cached = 0
        self.pool: Callable[[list[int]], list[float]] | None = None  # what prompts are pooled to
        self.burst = 1  # tokens the engine makes before anybody looks
        self.is_slow = False  # be quiet for a while first
        self.dies_after: int | None = None  # tokens
        self.submitted: list[Request] = []
        self.hello: Hello | None = None
        self.beat = None
        self.num_restarts, self.is_parked = 0, False
        self.on_hello: list[Any] = []
        self.on_beat: list[Any] = []
        self.on_picture: list[Any] = []
        self.adapters: dict[str, AdapterInfo] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._background: set[int] = set()

    def greet(self) -> None:
        size, eos = self.tokenizer.vocab_size, list(self.tokenizer.eos_ids)
        self.hello = Hello(1, "0", "Fake", MAX_MODEL_LEN, 8, 64, size, 8, eos, [], 0.0)
        for tell in self.on_hello:
            tell(self.hello)

    @property
    def is_up(self) -> bool:
        return self.hello is not None

    @property
    def can_step(self) -> bool:
        return self.is_up and not self.is_parked

    def why_not_ready(self) -> str | None:
        return None if self.is_up else "the engine is loading"

    @property
    def num_open(self) -> int:
        return len(self._tasks)

    @property
    def has_users(self) -> bool:
        return bool(self._tasks.keys() - self._background)

    @property
    def has_background(self) -> bool:
        return bool(self._tasks.keys() & self._background)

    def open(self, requests: Iterable[Request], is_background: bool = False) -> Tap:
        tap = Tap()
        for request in requests:
            if is_background:
                self._background.add(request.id)
            self.submitted.append(request)
            self._tasks[request.id] = asyncio.ensure_future(self._feed(request, tap))
        return tap

    def close(self, ids: Iterable[int]) -> None:
        for id in ids:
            if (task := self._tasks.pop(id, None)) is not None:
                task.cancel()

    def prompt(self) -> str:
        """The last prompt, as text."""
        request = self.submitted[-1]
        ids = request.tokens[: request.num_prompt].tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    async def _feed(self, request: Request, tap: Tap) -> None:
        if self.is_slow:
            await asyncio.sleep(0.01)
            tap.poke()
            await asyncio.sleep(0.01)
        tap.about[request.id] = About(request.id, self.num_cached, "", 0, 0.1, 0.2, 0.3)
        if request.params.pooling is not None and self.pool is not None:
            pooled = self.pool(request.tokens[: request.num_prompt].tolist())
            tap.put(TokenEvent(request.id, (), "length", None, pooled=pooled))
            return
        ids = self.tokenizer.encode(self.answer, add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_ids[0]][: request.max_tokens]
        if self.dies_after == 0:
            tap.fail(EngineDead("the engine stopped"))
            return
        for number, token in enumerate(ids, 1):
            finish = None
            if number == len(ids):
                finish = "stop" if token in self.tokenizer.eos_ids else "length"
            logprobs = self._logprobs(request, token)
            tap.events.append(TokenEvent(request.id, [token], finish, None, logprobs))
            if number == self.dies_after:
                tap.fail(EngineDead("the engine stopped"))
                return
            if number % self.burst == 0:
                tap.tell()
                await asyncio.sleep(0)
        tap.tell()

    def _logprobs(self, request: Request, token: int) -> tuple[TokenLogprobs, ...]:
        count = request.params.logprobs
        if count is None:
            return ()
        tops = (token, 3, 4)[:count]
        return (TokenLogprobs(token, -token / 1000, 1, tops, (-token / 1000, -4.0, -5.0)[:count]),)


class OpenChecker:
    """Lets every grammar of a decent size in, without compiling it."""

    async def check(self, params: StructuredOutputsParams) -> None:
        check_limits(params)

    async def aclose(self) -> None:
        pass


class Event(NamedTuple):
    name: str
    data: dict[str, Any]


class Bench:
    """One server to try requests on."""

    def __init__(self, verdict: Verdict | None = None, **settings: Any) -> None:
        engine = EngineArgs(model=MODEL, max_model_len=MAX_MODEL_LEN)
        self.settings = ServeSettings(engine=engine, log_level="error", **settings)
        tokenizer = chat_tokenizer()
        self.link = FakeLink(tokenizer)
        link, checker = cast("EngineLink", self.link), cast("GrammarChecker", OpenChecker())
        self.server = Server(self.settings, tokenizer, link, checker, verdict=verdict)
        self.server.card = ModelCard(
            "gguf", "Q8_0", 1_000, datetime(2026, 1, 2, tzinfo=UTC), "ab" * 32
        )
        self.app = App(self.server, routes(self.settings))
        self.link.greet()

    def client(self) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(app=self.app)  # type: ignore[arg-type]
        return httpx2.AsyncClient(transport=transport, base_url="http://test")

    async def send(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client() as client:
            return await client.post(path, content=content, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return asyncio.run(self.send(path, body, **headers))

    def get(self, path: str) -> httpx2.Response:
        async def work() -> httpx2.Response:
            async with self.client() as client:
                return await client.get(path)

        return asyncio.run(work())

    def events(self, path: str, body: dict[str, Any]) -> list[Event]:
        """The named events of a streamed answer; comments are left out."""
        reply = self.post(path, {**body, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return read_events(reply.text)


def read_events(text: str) -> list[Event]:
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        found.append(Event(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
