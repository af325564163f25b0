"""Models: several models behind one port, by name. Each has a `Server` of its own.

A request goes to the server of the model it names: by `model` in its body, or by `?model=` where
the body has none. If that model is not loaded, the request asks for it and waits. Lines of batches
ask as well, but nobody has to go for them, and they wait in their batch: they are sent back when
their model is not there, or somebody waits for the memory that it has. It is for other requests to
say that a model is in use. Keys, the watchman and what is stored are shared; links, tokenizers,
limits and metrics are each model's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import msgspec

from quire.routing.settings import AUTO, AutoSettings
from quire.server.auto import Auto
from quire.server.cascade import Escalated
from quire.server.http import HttpRequest
from quire.server.model_files import ModelFolder, ModelState
from quire.server.problems import Problem
from quire.server.server import Server

LOOK_S = 0.05
GIVES_WAY = "another model waits for the memory of this one"
TOUCH_S = 1.0
# Paths whose body says which model is meant, and in which field.
BODY_FIELDS = {
    **dict.fromkeys(
        (
            *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
            *("/v1/messages", "/v1/messages/count_tokens", "/v1/generate", "/score", "/v1/score"),
            *("/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling"),
            *("/tokenize", "/detokenize", "/api/generate", "/api/chat", "/api/embed"),
            *("/api/embeddings", "/api/show"),
        ),
        "model",
    ),
    "/v1/load_lora_adapter": "base_model_name",
    "/v1/unload_lora_adapter": "base_model_name",
}
TAG = ":latest"  # Ollama's clients add it


class Named(msgspec.Struct):
    model: object = None
    base_model_name: object = None


class Models:
    def __init__(
        self, servers: Sequence[Server], folders: Sequence[ModelFolder], broken: Mapping[str, str]
    ) -> None:
        """`broken`: models whose text side cannot be read, and why; they have no server."""
        self.servers = list(servers)
        self._folders = {
            server.model_names[0]: folder for server, folder in zip(servers, folders, strict=True)
        }
        self._broken = dict(broken)
        self.auto: Auto | None = None  # set by the composition root; None: nothing is chosen
        self._waits_for: dict[str, tuple[str, ...]] = {}  # by model, as last read
        self._decoder = msgspec.json.Decoder(Named)
        self._loading = {s.model_names[0] for s in servers}  # of those at start, still to settle
        for server in servers:
            server.models = self

    # ------------------------------------------------------------ states

    @property
    def names(self) -> list[str]:
        return [server.model_names[0] for server in self.servers]

    def state_of(self, name: str) -> ModelState:
        if name in self._broken:
            return ModelState("failed", self._broken[name])
        return self._folders[name].read()

    def states(self) -> dict[str, ModelState]:
        return {name: self.state_of(name) for name in (*self.names, *self._broken)}

    def folder(self, name: object) -> ModelFolder:
        """Raises Problem 404."""
        if not isinstance(name, str) or name not in self._folders:
            known = ", ".join(self._folders)
            raise Problem(
                404, f"there is no model {str(name)[:200]!r}; there are: {known}", param="model"
            )
        return self._folders[name]

    def why_not_ready(self) -> str | None:
        """Until all that are loaded at start have come up or failed."""
        for name in list(self._loading):
            if self.state_of(name).state != "loading":
                self._loading.discard(name)
        return f"loading: {', '.join(sorted(self._loading))}" if self._loading else None

    # ------------------------------------------------------------ requests

    async def serving(self, request: HttpRequest) -> Server:
        """The server that answers it, its engine there. Raises Problem."""
        field = BODY_FIELDS.get(request.path) if request.method == "POST" else None
        if field is None:
            return self._find(request.query.get("model"), request)
        name = self._named(request, field)
        if self.auto is not None and isinstance(name, str) and name.removesuffix(TAG) == AUTO:
            server = self.auto.choose(request)
        else:
            server = self._find(name, request)
        return await self._bring(server, request)

    async def escalated(self, request: HttpRequest, why: Escalated) -> Server:
        """The server that answers in place of the one whose answer will not do."""
        assert self.auto is not None
        return await self._bring(self.auto.escalate(request, why), request)

    def choose_by(self, settings: AutoSettings) -> None:
        """Requests may leave the choice to us. Raises BadRequest."""
        servers = {server.model_names[0]: server for server in self.servers}
        self.auto = Auto(settings, servers, lambda name: self.state_of(name).state == "failed")

    def _named(self, request: HttpRequest, field: str) -> object:
        try:
            return getattr(self._decoder.decode(request.body), field)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # the handler says what is wrong with it

    def _find(self, name: object, request: HttpRequest) -> Server:
        if not isinstance(name, str):
            return self.servers[0]
        plain = name.removesuffix(TAG) if request.path.startswith("/api/") else name
        if plain in self._broken:
            raise _failed(plain, self._broken[plain])
        for server in self.servers:
            if plain in server.model_names:
                return server
        for server in self.servers:
            if plain in server.link.adapters:
                return server
        self.servers[0].check_model(plain)  # takes placeholders, and refuses what nobody has
        return self.servers[0]

    async def _bring(self, server: Server, request: HttpRequest) -> Server:
        if request.is_background:
            self._check_room(server)
        else:
            await self._await(server)
        if request.route is not None:  # counted once, however often a line asks
            server.metrics.routed(request.route.choice.reason)
        return server

    async def _await(self, server: Server) -> None:
        name, folder = self._named_folder(server)
        folder.touch()
        deadline = time.monotonic() + server.limits.queue_timeout_s
        while not server.link.can_step:
            state = self._state_in_time(name, deadline)
            self._make_way(name, state)
            if state.state != "loading":  # or it is ready, and about to go
                folder.ask("load")
            folder.touch()
            await asyncio.sleep(LOOK_S)

    def _check_room(self, server: Server) -> None:
        """For a line of a batch, which holds no place for a model that may be long in coming.

        Raises Problem unless the model is there and keeps nobody waiting."""
        name, folder = self._named_folder(server)
        if server.link.can_step and not self._is_in_the_way(name):
            return folder.work()
        state = self._state_unless_failed(name)
        if state.state in ("unloaded", "parked"):
            folder.ask_softly()
        raise _not_there(name, state)

    def _named_folder(self, server: Server) -> tuple[str, ModelFolder]:
        name = server.model_names[0]
        return name, self._folders[name]

    def _state_in_time(self, name: str, deadline: float) -> ModelState:
        """Raises Problem when it failed, or has not come by then."""
        state = self._state_unless_failed(name)
        if time.monotonic() > deadline:
            raise _not_there(name, state)
        return state

    def _state_unless_failed(self, name: str) -> ModelState:
        state = self._folders[name].read()
        if state.state == "failed":
            raise _failed(name, state.reason)
        return state

    # ------------------------------------------------------------ giving way

    def _is_in_the_way(self, name: str) -> bool:
        return any(name in names for names in self._waits_for.values())

    def _make_way(self, name: str, state: ModelState) -> None:
        """Send lines of batches back whose models have what another one waits for."""
        self._waits_for[name] = state.waits_for
        for server in self.servers:
            if server.model_names[0] not in state.waits_for:
                continue
            for generation in list(server.watchman.generations):
                if generation.server is server and generation.http.is_background:
                    generation.tap.fail(Problem(503, GIVES_WAY, code="model_loading"))
            self._folders[server.model_names[0]].stop_work()

    async def run(self) -> None:
        """Keep models with open requests from being taken for idle."""
        if self.auto is not None and self.auto.spending is not None:
            await self.auto.spending.restore()
        while True:
            await asyncio.sleep(TOUCH_S)
            for server in self.servers:
                name, folder = self._named_folder(server)
                self._make_way(name, folder.read())
                if server.link.has_users:
                    folder.touch()
                    if server.link.is_parked:  # they came when it had just been told to go
                        folder.ask("load")
                elif server.link.has_background and not self._is_in_the_way(name):
                    folder.work()
                    if server.link.is_parked:
                        folder.ask_softly()


def _not_there(name: str, state: ModelState) -> Problem:
    why = state.reason or "it is being loaded"
    return Problem(
        503,
        f"the model {name!r} is not there yet: {why}; try again",
        code="model_loading",
        retry_after_s=5,
    )


def _failed(name: str, reason: str) -> Problem:
    return Problem(
        503,
        f"the model {name!r} could not be loaded: {reason}; POST /admin/models/load tries again",
        code="model_failed",
    )
