"""Matchers against languages small enough to write down, and against vocabularies that differ."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.errors import BadRequest, NotSupported
from quire.grammar.matcher import GrammarCompiler, GrammarError
from quire.params import StructuredOutputsParams
from tests.grammar.cases import EOS, VOCAB, WISHES, Wish, allowed, compiler
from tests.text.tiny_tokenizers import byte_fallback, byte_level

TOKENS = byte_level()


def spelled(tokens: list[int]) -> str:
    return TOKENS.decode(tokens)


def language(params: StructuredOutputsParams, longest: int = 12) -> set[str]:
    """Every text that some way through the masks can spell."""
    made = compiler()
    found: set[str] = set()
    paths: list[list[int]] = [[]]
    while paths:
        path = paths.pop()
        matcher = made.compile(params)
        matcher.restart(path)
        for token in allowed(matcher):
            if token == EOS:
                found.add(spelled(path))
            elif len(path) < longest:
                paths.append([*path, token])
    return found


@pytest.mark.parametrize(
    "choices",
    [["a", "ab", "abc", "b"], ["the lazy dog", "the fox"], ['"', "\\", "/", "\n\t", "é", "<s>"]],
    ids=str,
)
def test_choices_are_the_whole_language(choices: list[str]) -> None:
    """Red when a choice that begins another is lost, or an escape changes what is spelled."""
    assert language(StructuredOutputsParams(choice=choices)) == set(choices)


def test_a_finite_regex_is_the_whole_language() -> None:
    """Red when a token that reaches over the end of the pattern is allowed."""
    got = language(StructuredOutputsParams(regex="^(?:a|fo)(?:x{0,2})$"))
    assert got == {a + b for a in ("a", "fo") for b in ("", "x", "xx")}


@pytest.mark.parametrize("wish", WISHES, ids=lambda w: w.name)
def test_random_walks_end_in_what_was_wished(wish: Wish) -> None:
    """Red when the mask lets anything by that the oracle does not accept."""
    matcher = compiler().compile(wish.params)
    rng = random.Random(1)
    num_whole = 0
    for _ in range(30):
        matcher.restart()
        path: list[int] = []
        while len(path) < 400:
            choices = sorted(allowed(matcher))
            token = EOS if EOS in choices and rng.random() < 0.3 else rng.choice(choices)
            if token == EOS:
                assert wish.holds(spelled(path)), spelled(path)
                num_whole += 1
                break
            path.append(token)
            matcher.accept(token)
    assert num_whole >= 5, "the walks never got to an end: the test says nothing"


@pytest.mark.parametrize("vocab_size", [VOCAB - 40, VOCAB - 1, VOCAB, VOCAB + 1, VOCAB + 70, 384])
def test_vocabularies_that_differ(vocab_size: int) -> None:
    """Red when ids beyond the tokenizer can be drawn, or a model with fewer rows gets junk bits."""
    want = allowed(compiler().compile(StructuredOutputsParams(regex="[^q]*")))
    got = allowed(compiler(vocab_size).compile(StructuredOutputsParams(regex="[^q]*")), vocab_size)
    assert got == {token for token in want if token < vocab_size}
    assert len(want) > 250


def test_every_end_of_sequence_token_may_end() -> None:
    """Red when only the first of several is allowed, or accepting another one fails."""
    for end in (1, 2):
        matcher = compiler(eos_ids=(1, 2, 9999)).compile(StructuredOutputsParams(choice=["a"]))
        assert not allowed(matcher) & {1, 2}
        matcher.accept(TOKENS.encode("a").ids[0])
        assert matcher.is_finished
        assert allowed(matcher) == {1, 2}
        matcher.accept(end)
        assert matcher.is_finished
        assert allowed(matcher) == {1, 2}
        matcher.accept(70)  # ignore_eos: what follows the end is nobody's business
        assert allowed(matcher) == {1, 2}


def test_byte_fallback_vocabularies() -> None:
    """Red when a SentencePiece-style vocabulary is read with the wrong bytes."""
    tokens = byte_fallback()
    made = GrammarCompiler(tokens.to_str, tokens.get_vocab_size(), (2,))
    matcher = made.compile(StructuredOutputsParams(choice=["the cat", "日"]))
    first = {tokens.id_to_token(i) for i in allowed(matcher, tokens.get_vocab_size())}
    assert first == {"t", "<0x74>", "日", "<0xE6>"}


@pytest.mark.parametrize("wish", WISHES[:6], ids=lambda w: w.name)
def test_restart_is_where_the_output_ends(wish: Wish) -> None:
    """Red when a preempted request's replay does not lead to the state it had."""
    made, rng = compiler(), random.Random(2)
    walked, path = made.compile(wish.params), []
    for _ in range(25):
        choices = allowed(walked)
        replayed = made.compile(wish.params)
        replayed.restart(path)
        assert allowed(replayed) == choices
        token = rng.choice(sorted(choices))
        path.append(token)
        walked.accept(token)


def test_a_failure_stays() -> None:
    """Red when a matcher that was led astray goes on answering as if nothing had happened."""
    matcher = compiler().compile(StructuredOutputsParams(choice=["ab"]))
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        matcher.accept(TOKENS.encode("z").ids[0])
    for _ in range(2):
        with pytest.raises(GrammarError, match="doesn't satisfy"):
            matcher.fill(np.zeros(12, np.int32))
        with pytest.raises(GrammarError, match="doesn't satisfy"):
            matcher.accept(TOKENS.encode("a").ids[0])
    assert matcher.is_finished
    matcher.restart()
    assert allowed(matcher) == set(TOKENS.encode("a").ids)


def test_copies_do_not_see_each_other() -> None:
    """Red when two requests with one grammar share a position in it."""
    made = compiler()
    params = StructuredOutputsParams(choice=["ab", "cd"])
    one, two = made.compile(params), made.compile(params)
    one.accept(TOKENS.encode("a").ids[0])
    assert allowed(one) == set(TOKENS.encode("b").ids)
    assert allowed(two) == {TOKENS.encode("a").ids[0], TOKENS.encode("c").ids[0]}


def test_equal_wishes_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the cache is keyed by identity, or never lets go."""
    made = compiler()
    made.max_cached = 2
    plain, compiled = made._compile, []

    def counting(params: StructuredOutputsParams) -> object:
        compiled.append(params.regex)
        return plain(params)

    monkeypatch.setattr(made, "_compile", counting)
    for regex in ("a", "b", "a", "c", "a", "b"):
        made.compile(StructuredOutputsParams(regex=regex))
    assert compiled == ["a", "b", "c", "b"]
    assert len(made._cache) == 2


def test_a_lexer_that_is_used_up_is_made_anew() -> None:
    """Red when one client's random walk spoils the grammar for all who come after."""
    made, rng = compiler(), random.Random(3)
    params = StructuredOutputsParams(regex="[ab]*a[ab]{300}")
    letters = [TOKENS.encode(c).ids[0] for c in "ab"]
    row = np.empty(12, np.int32)

    def walk() -> None:
        for _ in range(200):
            matcher = made.compile(params)
            for _ in range(600):
                matcher.fill(row)
                matcher.accept(rng.choice(letters))

    with pytest.raises(GrammarError, match="too many states"):
        walk()
    assert allowed(made.compile(params)) == set(letters)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "(a"}, "unclosed group"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"not": {}}}, "not"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"grammar": "start: start"}, "cannot continue"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled(params: dict[str, object], reason: str) -> None:
    """Red when a bad grammar is accepted and fails later, or its reason is lost."""
    with pytest.raises(BadRequest, match=reason) as caught:
        compiler().compile(StructuredOutputsParams(**params))
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_models_that_cannot_have_grammars() -> None:
    """Red when a model without an end, or with an unreadable tokenizer, fails in the middle."""
    params = StructuredOutputsParams(regex="a")
    with pytest.raises(NotSupported, match="end-of-sequence"):
        compiler(eos_ids=()).compile(params)
    with pytest.raises(NotSupported, match="tokenizer"):
        GrammarCompiler(lambda: '{"model": 3}', 100, (1,)).compile(params)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when its absence is an ImportError instead of an instruction."""
    monkeypatch.setattr("quire.grammar.spec.find_spec", lambda name: None)
    with pytest.raises(NotSupported, match="pip install llguidance"):
        compiler().compile(StructuredOutputsParams(regex="a"))
