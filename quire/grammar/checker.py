"""GrammarChecker: whether a grammar compiles in bounded time and memory, asked before it is let in.

The compiling is done by one worker process that is killed and replaced when it takes too long or
dies, so no schema can harm the process that serves. Verdicts are remembered by hash, equal
questions asked at once share one answer, and no more than a few may wait. For one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from quire.errors import BadRequest, EngineDead, Overloaded, QuireError
from quire.grammar.spec import PARAM, check_limits, require_llguidance
from quire.grammar.worker_link import WORKER_COMMAND, WorkerDied, WorkerLink
from quire.params import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class CheckLimits:
    compile_s: float = 2.0
    start_s: float = 60.0  # a large vocabulary takes a second or two; a busy machine longer
    max_waiting: int = 16
    max_cached: int = 1024
    # A busy machine may be to blame for a timeout: judge again after a while.
    keep_timeout_s: float = 60.0


class Verdict(NamedTuple):
    error: str | None
    expires: float = float("inf")


class GrammarChecker:
    """Call `check` before a request is accepted, `aclose` once at the end.

    `read_tokenizer` gives the text of a tokenizer.json, as `Tokenizer.to_json` does.
    """

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        vocab_size: int,
        eos_ids: Iterable[int],
        limits: CheckLimits | None = None,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._read_tokenizer, self._vocab_size = read_tokenizer, vocab_size
        self._eos_ids = sorted(set(eos_ids))
        self.limits, self._command = limits or CheckLimits(), tuple(command)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Verdict]] = {}
        self._turn = asyncio.Lock()
        self._worker: asyncio.Task[WorkerLink] | None = None
        self._is_closed = False

    async def check(self, params: StructuredOutputsParams) -> None:
        """Raises BadRequest with the reason, Overloaded when too many wait, or NotSupported."""
        if self._is_closed:
            raise EngineDead("the grammar checker was closed")
        require_llguidance()
        check_limits(params)
        key = hashlib.sha256(json.dumps(asdict(params)).encode()).digest()
        verdict = self._known(key)
        if verdict is None:
            # Shielded: a client that leaves must not take the answer from others who wait for it.
            verdict = await asyncio.shield(self._asking.get(key) or self._ask(key, params))
        if verdict.error is not None:
            raise BadRequest(verdict.error, param=PARAM)

    async def aclose(self) -> None:
        """Kill and reap the worker; whoever waits gets EngineDead. Idempotent."""
        self._is_closed = True
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._kill_worker()

    # ------------------------------------------------------------ verdicts

    def _known(self, key: bytes) -> Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.expires < time.monotonic():
            return None
        self._verdicts.move_to_end(key)
        return verdict

    def _ask(self, key: bytes, params: StructuredOutputsParams) -> asyncio.Task[Verdict]:
        if len(self._asking) >= self.limits.max_waiting:
            raise Overloaded(f"{len(self._asking)} grammars wait to be checked; try again later")
        task = asyncio.create_task(self._judge(key, params), name="grammar check")
        self._asking[key] = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _judge(self, key: bytes, params: StructuredOutputsParams) -> Verdict:
        try:
            async with self._turn:
                verdict = await self._compile(params)
        except asyncio.CancelledError:
            if self._is_closed:
                raise EngineDead("the grammar checker was closed") from None
            raise
        finally:
            del self._asking[key]
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > self.limits.max_cached:
            self._verdicts.popitem(last=False)
        return verdict

    async def _compile(self, params: StructuredOutputsParams) -> Verdict:
        worker = await self._ready_worker()
        try:
            return Verdict(await worker.ask(params, self.limits.compile_s))
        except TimeoutError:
            error = f"took longer than {self.limits.compile_s:g} s to compile"
        except WorkerDied:
            error = "needs more memory than a grammar may take, or broke the compiler"
        await self._kill_worker()
        if not self._is_closed:
            self._worker = self._start_worker()  # ready, with luck, before the next question
        expires = time.monotonic() + self.limits.keep_timeout_s
        return Verdict(f"structured_outputs.{params.kind} {error}; simplify it", expires)

    # ------------------------------------------------------------ the worker

    def _start_worker(self) -> asyncio.Task[WorkerLink]:
        setup: dict[str, object] = {
            "tokenizer": self._read_tokenizer(),
            "vocab_size": self._vocab_size,
            "eos_ids": self._eos_ids,
        }
        start = WorkerLink.start(self._command, setup, self.limits.start_s)
        task = asyncio.create_task(start, name="grammar worker")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _ready_worker(self) -> WorkerLink:
        if self._worker is None:
            self._worker = self._start_worker()
        try:
            return await asyncio.shield(self._worker)
        except (QuireError, TimeoutError, OSError) as error:
            self._worker = None
            if isinstance(error, QuireError) and not isinstance(error, WorkerDied):
                raise
            raise Overloaded(f"the grammar worker did not start: {error!r}") from error

    async def _kill_worker(self) -> None:
        task, self._worker = self._worker, None
        if task is None:
            return
        task.cancel()  # no effect on a start that is over
        with suppress(asyncio.CancelledError, QuireError, TimeoutError, OSError):
            await (await task).kill()
