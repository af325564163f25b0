"""Server: what every handler may use, put together once per API process.

The engine link, the text side (tokenizer, templates, parsers), admission, keys, metrics. Handlers
get this and the request, nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from quire.engine.commands import Beat, Hello
from quire.engine.intake import Intake
from quire.engine.intake import Limits as IntakeLimits
from quire.errors import EngineDead
from quire.grammar.checker import GrammarChecker
from quire.obs.log import log_event
from quire.obs.metrics import ServerMetrics
from quire.obs.trace import NullTracer, Tracer
from quire.routing.settings import AUTO
from quire.server.admission import Admission
from quire.server.board import Alone, SharedBoard
from quire.server.keys import KeyRing
from quire.server.link import EngineLink
from quire.server.problems import Problem
from quire.server.settings import ServeSettings
from quire.server.watch import Watchman

if TYPE_CHECKING:
    from quire.load.card import ModelCard
    from quire.models.sequence_head import Verdict
    from quire.server.answer_cache import AnswerCache
    from quire.server.http import HttpRequest
    from quire.server.inside import Inside
    from quire.server.models import Models
    from quire.server.shelf import Shelf
    from quire.server.siblings import Siblings
    from quire.text.tokenizer import Tokenizer

T = TypeVar("T")

# What clients that must send some model send when nobody told them which.
PLACEHOLDERS = ("", "default", "dummy", "local-model", "model")
LARGE_TEXT = 16_384  # characters; shorter ones are handled on the loop in well under a millisecond


class Server:
    def __init__(
        self,
        settings: ServeSettings,
        tokenizer: Tokenizer,
        link: EngineLink,
        checker: GrammarChecker | None = None,
        tracer: Tracer | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        """`verdict` is what the model's classification head means; None: it generates."""
        self.settings, self.limits = settings, settings.limits
        self.tokenizer, self.link, self._checker = tokenizer, link, checker
        self._background_checker = checker  # of its own, so that no line is before anybody
        self.tracer, self.verdict = tracer or NullTracer(), verdict
        self.keys = KeyRing(settings.api_keys, settings.admin_keys, settings.key_weights)
        self.model_names = settings.served_model_names or (model_name(settings.engine.model),)
        self.created = int(time.time())
        self.begun = time.monotonic()
        self.metrics = ServerMetrics(self.model_names[0], settings.engine.max_model_len or 0)
        is_fair = settings.engine.scheduling_policy == "fair"
        self.admission = Admission(settings.limits, is_fair, _board(settings, self.keys))
        # Lines of batches have places of their own, so that they take none from anybody.
        self.background = Admission(replace(settings.limits, max_requests_per_key=0))
        self.watchman = Watchman(settings.limits)
        self.is_draining = False
        self.inside: Inside | None = None  # set by the composition root
        self.siblings: Siblings | None = None  # the same; None: there is one API process
        self.card: ModelCard | None = None  # the same
        self.shelf: Shelf | None = None  # the same; None: nothing is stored
        self.models: Models | None = None  # the same; None: there is one model
        self.answers: AnswerCache | None = None  # the same; None: every answer is made anew
        self._intake: Intake | None = None
        self._ids = itertools.count(1)
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="text")
        link.on_hello.append(self._greet)
        link.on_beat.append(self._count)

    # ------------------------------------------------------------ engine

    @property
    def is_down(self) -> bool:
        """Whether nobody answers now; of several models, one that is away comes when asked for."""
        return self.models is None and not self.link.is_up

    @property
    def background_places(self) -> int:
        """How much may be under way in the background at once, on whatever model."""
        servers = [self] if self.models is None else self.models.servers
        return max(server.background.max_running for server in servers)

    def _count(self, beat: Beat) -> None:
        self.metrics.engine(beat.counts, self._engine_pid())
        if beat.expert_tokens:
            self.metrics.experts(beat.expert_tokens, self._engine_pid())

    def _greet(self, hello: Hello) -> None:
        limits = IntakeLimits(hello.max_model_len, hello.vocab_size)
        eos = self.tokenizer.eos_ids or tuple(hello.eos_ids)
        if self._checker is None:
            self._checker, self._background_checker = (
                GrammarChecker(self.tokenizer.to_json, hello.vocab_size, eos) for _ in range(2)
            )
        if self._intake is not None:
            self.metrics.engine_restarted()
        # Ids go on across engines, so that no old one can be mistaken for a new one.
        ids = (hello.first_id + number for number in self._ids)
        self._intake = Intake(self.tokenizer, limits, eos, self.settings.engine.seed, ids)
        self.admission.max_running = self.background.max_running = hello.max_num_seqs
        log_event("engine_ready", pid=hello.pid, load_seconds=round(hello.load_seconds, 2))

    def _engine_pid(self) -> int:
        return self.link.hello.pid if self.link.hello is not None else 0

    @property
    def hello(self) -> Hello:
        """What the engine said of itself; raises EngineDead while there is none."""
        if self.link.hello is None:
            raise EngineDead(self.link.why_not_ready() or "the engine is not there")
        return self.link.hello

    @property
    def intake(self) -> Intake:
        if self._intake is None or not self.link.is_up:
            raise EngineDead(self.link.why_not_ready() or "the engine is not there")
        return self._intake

    def checker(self, is_background: bool) -> GrammarChecker:
        """Lines of batches ask a worker of their own, which starts with the first of them."""
        found = self._background_checker if is_background else self._checker
        if found is None:
            raise EngineDead(self.link.why_not_ready() or "the engine is not there")
        return found

    @property
    def max_model_len(self) -> int:
        return self.hello.max_model_len

    def check_model(self, name: str | None, request: HttpRequest | None = None) -> str:
        """The name to answer with; raises 404 for a model we do not serve.

        A placeholder is answered, as its sender has no other model in mind; `request` is warned.
        """
        if name is None:
            return self.model_names[0]
        if name in self.model_names:
            return name
        is_auto = name.removesuffix(":latest") == AUTO  # Ollama's clients add the tag
        if is_auto and request is not None and request.route is not None:
            return self.model_names[0]
        if name in self.link.adapters:
            if request is not None:
                request.adapter = name
            return name
        if self.settings.accept_any_model:
            return self.model_names[0]
        if name in PLACEHOLDERS:
            if request is not None:
                warning = f"model {name!r} is a placeholder; {self.model_names[0]} answers"
                request.warnings.append(warning)
            return self.model_names[0]
        served = self.model_names if self.models is None else self.models.names
        raise Problem(
            404,
            f"the model {name[:200]!r} is not served here; served: {', '.join(served)}",
            param="model",
            code="model_not_found",
        )

    # ------------------------------------------------------------ all API processes

    async def all_metrics(self) -> ServerMetrics:
        """What all API processes counted together."""
        if self.siblings is None:
            return self.metrics
        return self.metrics.joined(await self.siblings.metrics())

    def abort(self, request_id: str | None) -> int:
        """End a request of this process by the id its answer carries, or all; how many."""
        found = [
            generation
            for generation in list(self.watchman.generations)
            if request_id is None or generation.http.id == request_id
        ]
        for generation in found:
            generation.tap.fail(Problem(503, "an operator ended this request", code="aborted"))
        return len(found)

    # ------------------------------------------------------------ text

    async def in_thread(self, work: Callable[[], T], size: int = LARGE_TEXT) -> T:
        """Run text work on the loop when it is small, in a thread when it may take a while."""
        if size < LARGE_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def check_text_size(self, num_bytes: int, param: str) -> None:
        """Refuse what cannot fit before spending time on tokenising it."""
        most = self.limits.max_bytes_per_token * self.max_model_len
        if num_bytes > most:
            raise Problem(
                400,
                f"the prompt has {num_bytes} bytes, more than {most}, which is the most that"
                f" max_model_len={self.max_model_len} could hold; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    async def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        self.check_text_size(len(text), param)
        return await self.in_thread(
            lambda: self.tokenizer.encode(text, add_special_tokens), len(text)
        )

    async def aclose(self) -> None:
        for checker in (self._checker, self._background_checker):
            if checker is not None:
                await checker.aclose()
        self.tracer.close()
        if self.shelf is not None:
            self.shelf.close()
        self._executor.shutdown(wait=False, cancel_futures=True)


def _board(settings: ServeSettings, keys: KeyRing) -> Alone:
    if settings.api_processes == 1:
        return Alone()
    folder = Path(settings.runtime_folder)
    return SharedBoard(folder, settings.api_processes, settings.api_index, keys.salts)


def model_name(model: str) -> str:
    """A path's last part without its ending; names and repositories stay as they are.

    >>> [model_name(m) for m in ("./my-model/", "/models/a.gguf", "default", "org/name", "a/b/c")]
    ['my-model', 'a', 'default', 'org/name', 'c']
    """
    path = Path(os.path.abspath(model))  # not resolved: a link is named as it was called
    if path.suffix == ".gguf":
        return path.stem
    # A repository is `name` or `owner/name`, and a folder of that name is most likely its copy.
    is_path = model.startswith((".", "/", "~")) or model.rstrip("/").count("/") > 1
    return path.name or "model" if is_path else model.rstrip("/")
