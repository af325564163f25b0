"""The checker and its worker process: verdicts, deadlines, hostile grammars, and no zombies."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.errors import BadRequest, EngineDead, NotSupported, Overloaded
from quire.grammar.checker import CheckLimits, GrammarChecker
from quire.params import StructuredOutputsParams
from tests.grammar.cases import EOS, VOCAB
from tests.text.tiny_tokenizers import byte_level

ROOT = Path(__file__).resolve().parents[2]

# A worker that starts as the real one does and then does what the test's regex says.
ODD_WORKER = """
import os, sys, time
from quire.grammar import worker
real = worker.GrammarCompiler
class Odd(real):
    def compile(self, params):
        if params.regex == "hang":
            time.sleep(60)
        if params.regex == "crash":
            os.abort()
        if params.regex == "babble":
            os.write(1, b"library noise")
        if params.regex == "memory":
            bytearray(4 << 30)
        if params.regex == "pid":
            from quire.errors import BadRequest
            raise BadRequest(f"pid {os.getpid()}")
        return real.compile(self, params)
worker.GrammarCompiler = Odd
sys.exit(worker.main())
"""
ODD = (sys.executable, "-c", ODD_WORKER)


def checker(command: Sequence[str] | None = None, **limits: Any) -> GrammarChecker:
    more = {} if command is None else {"command": command}
    return GrammarChecker(byte_level().to_str, VOCAB, (EOS,), CheckLimits(**limits), **more)


def run(body: Callable[[GrammarChecker], Coroutine[Any, Any, None]], *args: Any, **kw: Any) -> None:
    async def whole() -> None:
        made = checker(*args, **kw)
        try:
            await body(made)
        finally:
            await made.aclose()

    asyncio.run(whole())
    assert children() == [], "a worker is left"


def children() -> list[str]:
    """Live or dead children of this process, but for those of other tests' libraries."""
    listed = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "stat=,args="], capture_output=True, text=True
    )
    mine = ("quire.grammar", "<defunct>")  # a server that other tests share is not ours
    return [line for line in listed.stdout.splitlines() if any(m in line for m in mine)]


async def verdict(made: GrammarChecker, params: StructuredOutputsParams) -> str | None:
    try:
        await made.check(params)
    except BadRequest as error:
        assert error.param == "structured_outputs"
        return str(error)
    return None


def regex(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def forked(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "string"}
    inner = forked(depth - 1)
    return {"anyOf": [{"type": "array", "items": inner}, {"properties": {"a": inner}}]}


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}}


HOSTILE = {
    "nested 200": {"json": nested(200)},
    "nested 20000": {"json": '{"not":' * 20_000 + "{}" + "}" * 20_000},
    "properties 5000": {"json": properties(5000)},
    "properties that fit": {"json": properties(2200)},
    "enum 100000": {"json": {"enum": [str(i) for i in range(100_000)]}},
    "enum that fits": {"json": {"enum": [f"{i:04}" for i in range(7000)]}},
    "anyOf depth 12": {"json": forked(12)},
    "anyOf that fits": {"json": forked(9)},
    "billion": {"regex": "a{1000000000}"},
    "billion in a grammar": {"grammar": 'start: "a"{1000000000} "b"{1000000000}'},
    "powers": {"regex": "(((a{100}){100}){100}){100}"},
    "look-ahead": {"regex": "(?=a)a"},
    "many states": {"regex": "[ab]*a[ab]{2000}"},
    "large strings": {"json": {"type": "string", "maxLength": 1_000_000_000}},
    "large pattern": {"json": {"type": "string", "pattern": "^[^\\n\\r]{1,100000}$"}},
    "self": {"json": {"$ref": "#"}},
    "left recursion": {"grammar": 'start: start start | "a" | ""'},
    "brackets": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "ebnf brackets": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
}


def test_verdicts() -> None:
    """Red when a good grammar is refused, or a bad one's reason does not come through."""

    async def body(made: GrammarChecker) -> None:
        assert await verdict(made, regex("a+")) is None
        assert await verdict(made, StructuredOutputsParams(json={"type": "object"})) is None
        assert "unclosed group" in str(await verdict(made, regex("(a")))
        bad = StructuredOutputsParams(json={"type": "strin"})
        assert "Invalid type: strin" in str(await verdict(made, bad))

    run(body)


def test_hostile_grammars_are_answered_in_time() -> None:
    """Red when one of them takes the worker's deadline twice over, or is not answered at all."""

    async def body(made: GrammarChecker) -> None:
        await made.check(regex("warm"))
        for name, fields in HOSTILE.items():
            begun = time.monotonic()
            error = await verdict(made, StructuredOutputsParams(**fields))
            assert time.monotonic() - begun < 5.0, name
            assert error is None or len(error) <= 400, (name, error)
        assert await verdict(made, regex("still alive")) is None

    run(body)


def test_a_late_worker_is_killed_and_replaced() -> None:
    """Red when a compilation without end holds the next one up, or its process survives."""

    async def body(made: GrammarChecker) -> None:
        first = await verdict(made, regex("pid"))
        begun = time.monotonic()
        assert "took longer than 0.3 s to compile" in str(await verdict(made, regex("hang")))
        assert time.monotonic() - begun < 3
        assert await verdict(made, regex("fine")) is None
        pid = int(str(first).split()[1])
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(body, ODD, compile_s=0.3)


@pytest.mark.parametrize("how", ["crash", "memory"])
def test_a_dead_worker_is_replaced(how: str) -> None:
    """Red when a crash, or more memory than a grammar may have, reaches anyone but its request."""

    async def body(made: GrammarChecker) -> None:
        assert "more memory" in str(await verdict(made, regex(how)))
        assert await verdict(made, regex("fine")) is None

    run(body, ODD)


def test_what_a_library_prints_is_not_a_reply() -> None:
    """Red when noise on stdout shifts every answer after it."""

    async def body(made: GrammarChecker) -> None:
        assert await verdict(made, regex("babble")) is None
        assert "unclosed" in str(await verdict(made, regex("(a")))

    run(body, ODD)


def test_equal_questions_share_one_answer() -> None:
    """Red when a hundred clients with one schema make the worker compile it a hundred times."""

    async def body(made: GrammarChecker) -> None:
        answers = await asyncio.gather(*(verdict(made, regex("hang")) for _ in range(50)))
        assert all("took longer" in str(answer) for answer in answers)
        begun = time.monotonic()
        assert "took longer" in str(await verdict(made, regex("hang")))  # remembered
        assert time.monotonic() - begun < 0.2

    begun = time.monotonic()
    run(body, ODD, compile_s=0.5)
    assert time.monotonic() - begun < 10


def test_timeouts_are_forgotten_and_verdicts_bounded() -> None:
    """Red when a busy minute refuses a good schema for ever, or the cache grows without end."""

    async def body(made: GrammarChecker) -> None:
        assert "took longer" in str(await verdict(made, regex("hang")))
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        await verdict(made, regex("hang"))
        assert time.monotonic() - begun > 0.2, "the old verdict was used"
        for i in range(6):
            await made.check(regex(f"a{i}"))
        assert len(made._verdicts) == 4

    run(body, ODD, compile_s=0.2, keep_timeout_s=0.05, max_cached=4)


def test_the_line_is_bounded() -> None:
    """Red when slow grammars can pile up without limit."""

    async def body(made: GrammarChecker) -> None:
        await made.check(regex("warm"))
        asked = [asyncio.create_task(verdict(made, regex(f"hang|{i}"))) for i in range(2)]
        slow = asyncio.create_task(verdict(made, regex("hang")))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="3 grammars wait"):
            await made.check(regex("one too many"))
        await asyncio.gather(*asked, slow)
        await made.check(regex("one too many"))

    run(body, ODD, compile_s=0.3, max_waiting=3)


def test_a_client_that_leaves_takes_nothing_along() -> None:
    """Red when a cancelled check leaves half a frame in the pipe or cancels its twins."""

    async def body(made: GrammarChecker) -> None:
        await made.check(regex("warm"))
        leaver = asyncio.create_task(made.check(regex("hang")))
        stayer = asyncio.create_task(verdict(made, regex("hang")))
        await asyncio.sleep(0.1)
        leaver.cancel()
        assert "took longer" in str(await stayer)
        assert await verdict(made, regex("fine")) is None

    run(body, ODD, compile_s=0.3)


def test_closing_ends_those_who_wait() -> None:
    """Red when shutdown hangs on a grammar, or leaves a process."""

    async def body(made: GrammarChecker) -> None:
        waiting = asyncio.create_task(made.check(regex("hang")))
        while made._worker is None or not made._worker.done():
            await asyncio.sleep(0.01)
        await made.aclose()
        with pytest.raises(EngineDead):
            await waiting
        with pytest.raises(EngineDead):
            await made.check(regex("a"))

    run(body, ODD, compile_s=30.0)


def test_a_worker_that_cannot_start() -> None:
    """Red when a broken installation looks like a client's mistake."""

    async def cannot(made: GrammarChecker) -> None:
        with pytest.raises(Overloaded, match="did not start"):
            await made.check(regex("a"))

    run(cannot, ("/nonexistent/python",))
    run(cannot, (sys.executable, "-c", "raise SystemExit(3)"))

    async def unreadable() -> None:
        made = GrammarChecker(lambda: '{"model": 3}', VOCAB, (EOS,))
        with pytest.raises(NotSupported, match="tokenizer"):
            await made.check(regex("a"))
        await made.aclose()

    asyncio.run(unreadable())
    assert children() == []


def test_the_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """Red when a killed server leaves compilers behind."""
    script = f"""
import asyncio, os, sys
from quire.grammar.checker import GrammarChecker
from quire.params import StructuredOutputsParams
async def main():
    made = GrammarChecker(lambda: open(sys.argv[1]).read(), {VOCAB}, ({EOS},))
    await made.check(StructuredOutputsParams(regex="a"))
    print(made._worker.result().process.pid, "torch" in sys.modules, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(byte_level().to_str())
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tokenizer)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert parent.stdout is not None
    pid, has_torch = parent.stdout.readline().split()
    assert has_torch == "False"
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "llguidance" in maps and "torch" not in maps
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in _status(pid):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.02)


def _status(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"


def test_keys_tell_grammars_apart() -> None:
    """Red when a verdict for one grammar is given for another of the same text."""

    async def body(made: GrammarChecker) -> None:
        text = json.dumps({"type": "object"})
        assert await verdict(made, StructuredOutputsParams(json=text)) is None
        assert await verdict(made, StructuredOutputsParams(grammar=text)) is not None

    run(body)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("quire.grammar.checker", ("torch", "llguidance", "msgspec")),
        ("quire.grammar.worker", ("torch", "llguidance", "msgspec")),
        ("quire.engine.core", ("torch", "llguidance", "msgspec")),
        ("quire.engine.build", ("llguidance", "msgspec")),
    ],
)
def test_imports_are_lazy(module: str, unwanted: tuple[str, ...]) -> None:
    """Red when an engine without grammars needs the library, or the worker loads torch."""
    code = f"import sys, {module}; print(*set(sys.modules) & set({unwanted!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == ""
