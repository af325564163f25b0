"""One request's grammar is its own affair: slow to compile, failing half-way, or aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from quire.engine.core import EngineCore
from quire.errors import BadRequest, NotSupported
from quire.grammar.matcher import GrammarCompiler, GrammarError, Matcher, Words
from quire.grammar.pending import UNEXPECTED, GrammarQueue
from quire.llm import LLM
from quire.params import SamplingParams, StructuredOutputsParams
from quire.request import Request
from quire.step import TokenEvent
from tests.unit.case import Case

YES = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes"]))
LETTERS = SamplingParams(
    max_tokens=20,
    min_tokens=20,
    seed=3,
    structured_outputs=StructuredOutputsParams(regex="[a-z]*"),
)
PLAIN = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)


class GatedCompiler(GrammarCompiler):
    """Compiles when the test says so; a regex of the right name fails as a bug would."""

    gate: threading.Event

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        self.gate.wait(10)
        if params.regex == "bug":
            raise KeyError("a bug of ours")
        return super().compile(params)


class Bench:
    """An engine whose grammar compiler has a gate."""

    def __init__(self, llm: LLM) -> None:
        engine = llm._engine
        tokenizer = llm.get_tokenizer()
        compiler = GatedCompiler(tokenizer.to_json, engine.spec.vocab_size, tokenizer.eos_ids)
        self.gate = compiler.gate = threading.Event()
        self.grammars = GrammarQueue(compiler, engine.runner.matchers)
        self.core = EngineCore(engine.core.scheduler, engine.runner, False, self.grammars)
        self.intake = llm._intake
        self.events: list[TokenEvent] = []

    def add(self, params: SamplingParams) -> list[Request]:
        _, family = self.intake.requests("the fox", params)
        self.core.add(family[0])
        return family

    def step(self) -> None:
        self.events += self.core.step()

    def finish(self) -> dict[int, TokenEvent]:
        """Run to the end; the last event of each request."""
        deadline = time.monotonic() + 20
        while self.core.has_work:
            assert time.monotonic() < deadline, "the engine does not come to an end"
            self.step()
        ends = [event for event in self.events if event.finish is not None]
        assert len({event.request_id for event in ends}) == len(ends), "two last events"
        assert len(self.grammars.matchers) == 0
        return {event.request_id: event for event in ends}


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


@pytest.fixture
def bench(llm: LLM) -> Iterator[Bench]:
    bench = Bench(llm)
    yield bench
    bench.gate.set()


def test_others_go_on_while_a_grammar_compiles(bench: Bench) -> None:
    """Red when the step loop waits for a compiler."""
    (held,), (free,) = bench.add(YES), bench.add(PLAIN)
    while free.num_output < 20:
        bench.step()
    assert held.num_output == 0 and bench.core.has_work
    bench.gate.set()
    ends = bench.finish()
    assert ends[held.id].finish == "stop" and held.num_output == 4
    assert ends[free.id].finish == "length"


def test_waiting_for_a_compiler_does_not_spin(bench: Bench) -> None:
    """Red when an engine with nothing else to do burns a core."""
    bench.add(YES)
    begun, num_steps = time.monotonic(), 0
    while time.monotonic() - begun < 0.2:
        bench.step()
        num_steps += 1
    assert num_steps < 80, f"{num_steps} steps in 0.2 s"
    bench.gate.set()
    bench.finish()


def test_abort_while_compiling(bench: Bench) -> None:
    """Red when a request that waits for its grammar cannot be ended, or ends twice."""
    (one,), (two,) = bench.add(YES), bench.add(YES)
    (event,) = bench.core.abort(one.id)
    assert event.finish == "abort" and event.request_id == one.id
    assert bench.core.abort(one.id) == []
    bench.gate.set()
    assert list(bench.finish()) == [two.id]


def test_abort_of_some_answers_while_compiling(bench: Bench) -> None:
    """Red when a prompt's first answer takes the others with it, or a child cannot be aborted."""
    first, second, third = bench.add(YES.with_(n=3, temperature=1.0))
    assert [e.request_id for e in bench.core.abort(second.id)] == [second.id]
    assert [e.request_id for e in bench.core.abort(first.id)] == [first.id]
    bench.gate.set()
    ends = bench.finish()
    assert list(ends) == [third.id] and ends[third.id].finish == "stop"
    both = bench.add(YES.with_(n=2))
    for request in both:
        bench.core.abort(request.id)
    assert not bench.core.has_work


def test_abort_while_running_frees_the_matcher(bench: Bench) -> None:
    """Red when aborts leave matchers behind."""
    bench.gate.set()
    family = bench.add(LETTERS.with_(n=2))
    while family[0].num_output < 2:
        bench.step()
    assert len(bench.grammars.matchers) == 2
    for request in family:
        bench.core.abort(request.id)
    assert len(bench.grammars.matchers) == 0
    bench.finish()


def test_every_answer_of_a_bad_grammar_ends(bench: Bench) -> None:
    """Red when n > 1 leaves answers that never end."""
    bench.gate.set()
    bad = YES.with_(n=3, structured_outputs=StructuredOutputsParams(regex="(a"))
    family = bench.add(bad)
    ends = bench.finish()
    assert set(ends) == {request.id for request in family}
    for event in ends.values():
        assert event.finish == "error" and "unclosed group" in str(event.error)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_compiler_ends_one_request(bench: Bench) -> None:
    """Red when a dead compiler thread leaves requests waiting for ever."""
    (buggy,) = bench.add(YES.with_(structured_outputs=StructuredOutputsParams(regex="bug")))
    (queued,) = bench.add(YES)
    bench.gate.set()
    ends = bench.finish()
    assert ends[buggy.id].finish == "error" and ends[buggy.id].error == UNEXPECTED
    assert ends[queued.id].finish == "stop"
    (later,) = bench.add(YES)
    assert bench.finish()[later.id].finish == "stop"


class FailingMatcher(Matcher):
    """Fails at its third mask."""

    num_left = 3

    def fill(self, row: Words) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise GrammarError("a limit was exceeded")
        super().fill(row)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_matcher_that_fails_ends_its_request_alone(bench: Bench, lag: int) -> None:
    """Red when a limit hit in one request's grammar changes or ends another request."""
    bench.gate.set()
    bench.core.lag = lag
    others = [LETTERS, PLAIN, LETTERS.with_(logprobs=2)]
    quiet = [bench.add(params)[0] for params in others]
    bench.finish()
    want = [request.output for request in quiet]
    assert all(len(output) == 20 for output in want)

    plain_add = bench.grammars.matchers.add
    (doomed,) = bench.add(LETTERS.with_(logprobs=1))

    def add(request_id: int, matcher: Matcher) -> None:
        made = FailingMatcher(matcher._compiled) if request_id == doomed.id else matcher
        plain_add(request_id, made)

    bench.grammars.matchers.add = add  # type: ignore[method-assign]
    again = [bench.add(params)[0] for params in others]
    ends = bench.finish()
    assert [request.output for request in again] == want
    assert ends[doomed.id].finish == "error" and ends[doomed.id].error == "a limit was exceeded"
    assert ends[doomed.id].tokens == () and ends[doomed.id].logprobs == ()
    assert doomed.num_output == 3
    seen = [t for e in bench.events if e.request_id == doomed.id for t in e.tokens]
    assert seen == doomed.output


def test_an_engine_without_a_tokenizer_refuses() -> None:
    """Red when a request with a grammar is run without it."""
    case = Case()
    request = Request.new(1, [1, 2], YES)
    with pytest.raises(NotSupported, match="tokenizer"):
        case.core.add(request)
    assert not case.core.has_work


def test_intake_refuses_early(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when what can be refused at once is only found by the compiler."""
    remote = StructuredOutputsParams(json={"$ref": "http://example.com/schema"})
    with pytest.raises(BadRequest, match="nothing is ever fetched"):
        llm.generate("the", YES.with_(structured_outputs=remote), use_tqdm=False)
    monkeypatch.setattr("quire.grammar.spec.find_spec", lambda name: None)
    with pytest.raises(NotSupported, match="pip install llguidance"):
        llm.generate("the", YES, use_tqdm=False)


def test_a_lost_step_leaves_no_matcher(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when requests that an error ended keep their grammars."""

    def lost(*args: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm._engine.runner, "sampler", lost)
    outputs = llm.generate(["the"] * 3, [YES, PLAIN, YES], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 3
    assert len(llm._engine.runner.matchers) == 0
    monkeypatch.undo()
    (output,) = llm.generate("the", YES, use_tqdm=False)
    assert output.outputs[0].text == "yes"
