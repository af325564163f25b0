"""Proposers against brute force: what they find is there, and nothing longer is."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.params import SamplingParams
from quire.request import Request
from quire.spec.automaton import SuffixAutomaton
from quire.spec.ngram import Ngram
from quire.spec.suffix import Suffix
from quire.speculative import SpecConfig

texts = st.lists(st.integers(0, 2), min_size=1, max_size=60)


def places(text: list[int], run: list[int]) -> list[int]:
    """Where a run ends."""
    size = len(run)
    return [i + size for i in range(len(text) - size + 1) if text[i : i + size] == run]


def request_of(tokens: list[int], num_prompt: int | None = None, id: int = 1) -> Request:
    made = Request.new(id, tokens, SamplingParams(max_tokens=99))
    made.num_prompt = len(tokens) if num_prompt is None else num_prompt
    return made


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=texts, data=st.data())
def test_automaton_counts_every_run(text: list[int], data: st.DataObject) -> None:
    """Red when a run that was there is missed, or counts are off."""
    automaton = SuffixAutomaton(text)
    start = data.draw(st.integers(0, len(text) - 1))
    run = text[start : data.draw(st.integers(start + 1, len(text)))]
    state = length = 0
    for token in run:
        state, length = automaton.follow(state, length, token)
    assert length == len(run) and automaton.count[state] == len(places(text, run))
    followers = Counter(text[end] for end in places(text, run) if end < len(text))
    found = automaton.continued(state)
    assert (found is None) == (not followers)
    if found is not None:
        token, share = found
        assert followers[token] == max(followers.values())
        assert share == pytest.approx(followers[token] / len(places(text, run)))


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(text=texts, others=st.lists(texts, min_size=1, max_size=4))
def test_following_another_text_finds_its_longest_end(
    text: list[int], others: list[list[int]]
) -> None:
    """Red when a place in recent answers is lost, also while answers are added on the way."""
    automaton = SuffixAutomaton()
    state, length, read = 0, 0, []
    for i, token in enumerate(text):
        if i % 15 == 0 and others:
            for other in others.pop():
                automaton.add(other)
                read.append(other)
            automaton.add(-1 - automaton.num_tokens)
            read.append(-len(read) - 1)
        state, length = automaton.settled(state, length)
        state, length = automaton.follow(state, length, token)
        # A place may be shorter than what was added since; it is never longer, and always true.
        assert length == 0 or places(read, text[i + 1 - length : i + 1])
    full = SuffixAutomaton(read)
    state = length = 0
    for token in text:
        state, length = full.follow(state, length, token)
    wanted = next((n for n in range(len(text), 0, -1) if places(read, text[-n:])), 0)
    assert length == wanted
    if length:
        assert full.count[state] == len(places(read, text[-length:]))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(text=texts)
def test_ngram_continues_the_latest_longest_match(text: list[int]) -> None:
    """Red when a match is missed, begins inside a token, or an earlier one is preferred."""
    guess = Ngram(SpecConfig("ngram", prompt_lookup_min=2, prompt_lookup_max=4)).propose(
        request_of(text), 5
    )
    sizes = [n for n in (4, 3, 2) if n < len(text) and len(places(text, text[-n:])) > 1]
    if not sizes:
        assert guess.tokens == ()
        return
    end = places(text, text[-sizes[0] :])[-2]
    wanted = list(text)
    for i in range(5):
        wanted.append(wanted[end + i])
    assert list(guess.tokens) == wanted[len(text) :]


def test_ngram_is_not_fooled_by_bytes_across_tokens() -> None:
    """Red when a match is taken at a byte that begins no token."""
    text = [0x01020304, 0x05060708, 0x03040506, 0x0102]
    shifted = int.from_bytes(bytes([0x04, 0x03, 0x02, 0x01])[1:] + b"\x08", "little")
    guess = Ngram(SpecConfig("ngram", prompt_lookup_min=1)).propose(request_of([*text, shifted]), 3)
    assert guess.tokens == ()


def test_answers_help_only_their_own_tenant() -> None:
    """Red when one salt's answers are offered under another."""
    suffix = Suffix(SpecConfig("suffix"))
    answer = list(range(40, 60))
    done = request_of([1, 2, 3, *answer], num_prompt=3)
    done.cache_salt = "one"
    suffix.propose(done, 4)
    suffix.forget(done)
    asking = request_of([9, *answer[:6]], id=2)
    asking.cache_salt = "one"
    assert suffix.propose(asking, 4).tokens == tuple(answer[6:10])
    other = request_of([9, *answer[:6]], id=3)
    other.cache_salt = "two"
    assert suffix.propose(other, 4).tokens == ()


def test_recent_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when answers pile up, or when the newest is forgotten first."""
    monkeypatch.setattr("quire.spec.suffix.KEPT_TOKENS", 100)
    suffix, rng = Suffix(SpecConfig("suffix")), random.Random(1)
    for id in range(50):
        answer = [rng.randrange(1000) for _ in range(30)]
        suffix.forget(request_of([1, *answer], num_prompt=1, id=id))
    kept = suffix._answers[""]
    assert kept.young.num_tokens + kept.old.num_tokens <= 220
    asking = request_of([5, *answer[:8]], id=99)
    assert suffix.propose(asking, 3).tokens == tuple(answer[8:11])
    assert not suffix._seen.keys() - {99}


def test_keys_bound_what_is_guessed() -> None:
    """Red when a key that limits guesses is not read."""
    text = [*range(40), *range(12)]

    def found(**keys: float) -> int:
        suffix = Suffix(SpecConfig("suffix", **keys))  # type: ignore[arg-type]
        return len(suffix.propose(request_of(text), 99).tokens)

    assert found() == 12
    assert found(suffix_decoding_max_spec_factor=2.0) == 24
    assert found(suffix_decoding_max_spec_factor=0.0) > 24
    assert found(suffix_decoding_max_tree_depth=5) == 5
    assert found(suffix_decoding_min_token_prob=0.8) == 2
    assert Suffix(SpecConfig("suffix")).propose(request_of(text), 3).tokens == (12, 13, 14)
