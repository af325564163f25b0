"""Constrained generation on a random model, which tries everything a mask lets by.

Oracles are those of `cases.py` and transformers' logits; invariance is against the same requests
in an engine with room for all. Turns red when a mask is late by one token, lands in another row,
or is lost to chunking, preemption, overlap or a neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.llm import LLM
from quire.params import SamplingParams, StructuredOutputsParams
from quire.request import Request
from tests.engine.test_graph_path import with_graphs
from tests.grammar.cases import WISHES, Wish, allowed, compiler
from tests.text.tiny_tokenizers import byte_level

MakeLLM = Callable[..., LLM]
LONGEST = 128
# A random model would write blanks most of the time wherever JSON allows them.
BLANKS = {
    token: -30.0
    for token in range(byte_level().get_vocab_size())
    if byte_level().decode([token]).isspace()
}
PROMPTS = ["the quick", "fox", "def main():\n    return", "naïve", "the quick brown fox jumps over"]


@pytest.fixture(scope="module")
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(max_model_len=LONGEST)


def constrained(wish: Wish, seed: int = 0, **more: Any) -> SamplingParams:
    bias = BLANKS if wish.name != "choice-prefixes" else None
    return SamplingParams(
        max_tokens=100,
        seed=seed,
        structured_outputs=wish.params,
        **{"logit_bias": bias, **more},
    )


def texts(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[str | None]:
    """The text of each answer that came to its end, None for one that was cut short."""
    found: list[str | None] = []
    for output in llm.generate(list(prompts), list(params), use_tqdm=False):
        for answer in output.outputs:
            assert answer.finish_reason in ("stop", "length"), answer
            found.append(answer.text if answer.finish_reason == "stop" else None)
    return found


def requests(llm: LLM, wishes: Sequence[Wish | None], **more: Any) -> list[Request]:
    made = []
    for i, wish in enumerate(wishes):
        plain = SamplingParams(max_tokens=70, seed=i, ignore_eos=True)
        params = plain if wish is None else constrained(wish, seed=i, **more)
        made += llm._intake.requests(PROMPTS[i % len(PROMPTS)], params)[1]
    return made


def run(llm: LLM, wanted: Sequence[Request], lag: int = 0) -> list[list[int]]:
    core = llm._engine.core
    core.lag = lag
    for request in wanted:
        core.add(request)
    while core.has_work:
        core.step()
    assert len(llm._engine.runner.matchers) == 0, "a matcher outlived its request"
    assert core.scheduler.kv.allocator.num_live == 0
    return [request.output for request in wanted]


@pytest.mark.parametrize("wish", WISHES, ids=lambda w: w.name)
def test_answers_are_what_was_wished(llm: LLM, wish: Wish) -> None:
    """Red when anything is drawn that the grammar does not allow, at any seed."""
    params = [constrained(wish, seed) for seed in range(16)]
    answers = texts(llm, [PROMPTS[i % len(PROMPTS)] for i in range(16)], params)
    whole = [text for text in answers if text is not None]
    assert all(wish.holds(text) for text in whole), whole
    assert len(whole) >= 4, "hardly any answer came to its end: the test says nothing"


EVERYONE: list[Wish | None] = [None, *WISHES, None, WISHES[4], WISHES[1], WISHES[7], None]


@pytest.fixture(scope="module")
def together(llm: LLM) -> list[list[int]]:
    return run(llm, requests(llm, EVERYONE))


def test_company_changes_nothing(llm: LLM, together: list[list[int]]) -> None:
    """Red when a mask lands in a neighbour's row, or neighbours shift a matcher."""
    alone = [run(llm, [request])[0] for request in requests(llm, EVERYONE)]
    assert alone == together
    plain = [i for i, wish in enumerate(EVERYONE) if wish is None]
    only = run(llm, [request for i, request in enumerate(requests(llm, EVERYONE)) if i in plain])
    assert only == [together[i] for i in plain]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"max_chunk": 3},
        {"enable_prefix_caching": False, "page_size": 16},
    ],
    ids=str,
)
def test_the_shape_of_steps_changes_nothing(
    make_llm: MakeLLM, together: list[list[int]], changes: dict[str, Any], lag: int
) -> None:
    """Red when the token of step n is not seen by the mask of step n + 1."""
    other = make_llm(max_model_len=LONGEST, **changes)
    assert run(other, requests(other, EVERYONE), lag) == together


@pytest.mark.parametrize("lag", [0, 1])
def test_graphs_change_nothing(make_llm: MakeLLM, together: list[list[int]], lag: int) -> None:
    """Red when the padding of a captured step shifts masks to other rows."""
    other = make_llm(max_model_len=LONGEST)
    graphs = with_graphs(other._engine)
    assert run(other, requests(other, EVERYONE), lag) == together
    assert graphs.num_replays > 20


@pytest.fixture(scope="module")
def short_of_memory(llm: LLM) -> dict[str, int]:
    """Room for one request of any length and hardly a second, whatever a page holds."""
    page_bytes = llm._engine.runner.pool.cache.page_bytes
    return {"max_model_len": LONGEST, "kv_cache_memory": page_bytes * 34}


@pytest.mark.parametrize("lag", [0, 1])
def test_preemption_changes_nothing(
    make_llm: MakeLLM, together: list[list[int]], short_of_memory: dict[str, int], lag: int
) -> None:
    """Red when a matcher is not brought back to where its request's output ends."""
    other = make_llm(**short_of_memory)
    assert run(other, requests(other, EVERYONE), lag) == together
    num = other.stats().num_preempted
    assert num > 3, f"{num} preempted: the pool was meant to be too small"


@pytest.mark.parametrize("lag", [0, 1])
def test_preemption_of_the_only_grammar(
    llm: LLM, make_llm: MakeLLM, short_of_memory: dict[str, int], lag: int
) -> None:
    """Red when a token drawn before a preemption is accepted a second time after it."""
    other = make_llm(**short_of_memory)
    letters = Wish("letters", StructuredOutputsParams(regex="([a-z][0-9]){20}"), bool)
    company: list[Wish | None] = [None, None, None, None, letters, None]
    want = run(llm, requests(llm, company))
    wanted = requests(other, company)
    assert run(other, wanted, lag) == want
    assert wanted[4].num_preempted > 0, "it was meant to lose its row"


def test_several_answers(llm: LLM) -> None:
    """Red when the answers to one prompt share a matcher."""
    wish = WISHES[0]
    params = constrained(wish, seed=5, n=8)
    # After this prompt no model of these tests prefers one of the choices by far.
    (output,) = llm.generate("fox", params, use_tqdm=False)
    found = {answer.text for answer in output.outputs}
    assert found <= {"yes", "no", "maybe so"} and len(found) > 1
    assert all(answer.finish_reason == "stop" for answer in output.outputs)


@torch.no_grad()
@pytest.mark.parametrize("weights", ["float32"], indirect=True)
def test_greedy_takes_the_best_allowed_token(llm: LLM, tiny_folder: Path) -> None:
    """Oracle: transformers' logits, cut by a matcher of our own walk."""
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_folder).eval()
    wish = next(w for w in WISHES if w.name == "regex")
    params = SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=wish.params)
    (output,) = llm.generate("the quick", params, use_tqdm=False)
    tokens, matcher = list(output.prompt_token_ids), compiler().compile(wish.params)
    for got in output.outputs[0].token_ids:
        logits = model(torch.tensor([tokens])).logits[0, -1]
        banned = [t for t in range(len(logits)) if t not in allowed(matcher)]
        logits[banned] = -torch.inf
        assert got == int(logits.argmax())
        tokens.append(got)
        matcher.accept(got)
    assert output.outputs[0].finish_reason == "stop"


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    """Red when the mask leaks into the log-probabilities that are reported."""
    free = SamplingParams(max_tokens=1, logprobs=5, temperature=0.0)
    wish = StructuredOutputsParams(choice=["zebra"])
    bound = free.with_(structured_outputs=wish)
    one, two = llm.generate(["the quick"] * 2, [free, bound], use_tqdm=False)
    (want,), (got,) = one.outputs[0].logprobs or [], two.outputs[0].logprobs or []
    top = sorted(want, key=lambda token: -want[token].logprob)[:5]
    assert [got[token].logprob for token in top] == pytest.approx(
        [want[token].logprob for token in top], abs=1e-5
    )
    chosen = two.outputs[0].token_ids[0]
    assert got[chosen].rank > 1 and chosen == byte_level().encode("z").ids[0]


def test_other_parameters_compose(llm: LLM) -> None:
    """Red when min_tokens, stop strings, biases or allowed tokens stop working beside a mask."""
    letters = StructuredOutputsParams(regex="[ab]*")
    a, b = (byte_level().encode(c).ids[0] for c in "ab")
    base = SamplingParams(max_tokens=30, structured_outputs=letters)
    wishes = [
        base.with_(min_tokens=12, logit_bias={1: 100.0}),
        base.with_(stop=["ab"], logit_bias={1: -100.0}),
        base.with_(allowed_token_ids=[b, 1], min_tokens=3),
        base.with_(logit_bias={a: 100.0, 1: -100.0}, temperature=0.0),
        base.with_(logit_bias={70: 100.0, a: 5.0}, repetition_penalty=2.0),
        base.with_(bad_words=["a"], min_tokens=4),
        base.with_(ignore_eos=True, logit_bias={1: 100.0}, temperature=0.0),
    ]
    outputs = llm.generate(["the fox"] * len(wishes), wishes, use_tqdm=False)
    early, stopped, only_b, only_a, odd, no_a, endless = (o.outputs[0] for o in outputs)
    assert len(early.token_ids) == 13 and early.finish_reason == "stop"
    assert stopped.stop_reason == "ab" and set(stopped.text) <= {"a", "b"}
    assert set(only_b.text) == {"b"} and len(only_b.text) >= 3
    assert only_a.text == "a" * 30
    assert set(odd.text) <= {"a", "b"}
    assert set(no_a.text) == {"b"}
    assert endless.token_ids == [1] * 30 and endless.finish_reason == "length"


def test_what_cannot_be_satisfied_fails_alone(llm: LLM) -> None:
    """Red when an empty row draws a token, or ends the batch."""
    yes = StructuredOutputsParams(choice=["yes"])
    y, e = (byte_level().encode(c).ids[0] for c in "ye")
    base = SamplingParams(max_tokens=10, structured_outputs=yes)
    wishes = [
        base.with_(min_tokens=8),  # complete after three tokens
        base.with_(allowed_token_ids=[y, e]),  # no s
        base.with_(bad_words=["e"]),  # found by the draw, not before it
        base,
        SamplingParams(max_tokens=10, seed=1, ignore_eos=True),
    ]
    for lag in (0, 1):
        llm._engine.core.lag = lag
        outputs = llm.generate(["the fox"] * len(wishes), wishes, use_tqdm=False)
        found = [output.outputs[0] for output in outputs]
        assert [f.finish_reason for f in found] == ["error"] * 3 + ["stop", "length"]
        assert [f.text for f in found[:4]] == ["yes", "ye", "y", "yes"]
        assert all("no token is left" in str(f.stop_reason) for f in found[:3])
        assert len(found[4].token_ids) == 10
    assert llm.stats().num_running == 0


def test_bad_grammars_end_their_own_request(llm: LLM) -> None:
    """Red when a grammar that does not compile takes others along, or its reason is lost."""
    bad = SamplingParams(n=2, structured_outputs=StructuredOutputsParams(regex="a(?=b)"))
    good = constrained(WISHES[0])
    outputs = llm.generate(["the"] * 3, [bad, good, bad], use_tqdm=False)
    for output in (outputs[0], outputs[2]):
        assert [a.finish_reason for a in output.outputs] == ["error", "error"]
        assert all("look-around" in str(a.stop_reason) for a in output.outputs)
    assert WISHES[0].holds(outputs[1].outputs[0].text)


def test_without_grammars_nothing_is_paid(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a step without a grammar waits for tokens or makes a mask."""

    def never(*args: object) -> None:
        raise AssertionError("asked for a mask")

    monkeypatch.setattr(llm._engine.runner.masks, "make", never)
    llm.generate(["the fox"] * 3, SamplingParams(max_tokens=5), use_tqdm=False)


def test_streams_are_constrained_too(llm: LLM) -> None:
    """Red when closing a stream leaves its matcher behind."""
    wish = WISHES[2]
    pieces = list(llm.stream("the", constrained(wish)))
    assert wish.holds("".join(piece.text for piece in pieces))
    stream = llm.stream("the", constrained(WISHES[7]))
    for _ in range(2):
        next(stream)
    stream.close()
    assert len(llm._engine.runner.matchers) == 0
