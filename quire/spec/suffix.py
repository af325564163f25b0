"""Suffix: the newest tokens looked up in the request itself and in recent answers.

In the request itself the place is followed (`followed.py`), so a prompt that is written again with
edits is found again behind each of them. In answers the longest run that was there before is
continued with the token that followed it most often. What is unlikely on the whole is left out.
Answers are kept by cache salt, so no tenant is offered another's words, and forgotten by halves: an
automaton (`automaton.py`) cannot shrink.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from math import prod
from operator import mul

from quire.request import Request, RequestId
from quire.spec.automaton import SuffixAutomaton
from quire.spec.followed import Followed, trust
from quire.spec.proposer import NOTHING, Guess
from quire.speculative import SpecConfig

OWN_TOKENS = 1 << 14  # newest tokens of a long prompt that are looked at
KEPT_TOKENS = 1 << 15  # of recent answers, twice: half of them are forgotten at once
MAX_SALTS = 16


@dataclass(slots=True)
class Answers:
    """Recent answers under one salt, each ended by a number that is no token."""

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    num_young: int = 0

    def add(self, tokens: list[int], most: int) -> None:
        self.num_young += 1
        if self.young.num_tokens + len(tokens) > KEPT_TOKENS or 2 * self.num_young > most:
            self.old, self.young, self.num_young = self.young, SuffixAutomaton(), 1
        for token in tokens:
            self.young.add(token)
        self.young.add(-1 - self.young.num_tokens)


@dataclass(slots=True)
class Place:
    """Where a request's newest tokens are in an automaton of others' answers."""

    text: SuffixAutomaton
    state: int = 0
    length: int = 0
    num_seen: int = 0

    def move(self, tokens: Sequence[int], most: int) -> None:
        begins, end = self.text.next[0], len(tokens)
        for at in range(max(self.num_seen, end - most), end):
            token = tokens[at]
            if self.state or token in begins:
                self.state, self.length = self.text.follow(self.state, self.length, token)
        self.num_seen = end
        if self.state:
            self.state, self.length = self.text.settled(self.state, self.length)


@dataclass(slots=True)
class Seen:
    """One request: its own text, and its places in others'."""

    own: Followed
    num_seen: int
    places: list[Place] = field(default_factory=list)


class Suffix:
    def __init__(self, config: SpecConfig) -> None:
        self._longest = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._floor = config.suffix_decoding_min_token_prob
        self._max_answers = config.suffix_decoding_max_cached_requests
        self._seen: dict[RequestId, Seen] = {}
        self._answers: OrderedDict[str, Answers] = OrderedDict()

    def propose(self, request: Request, most: int) -> Guess:
        seen = self._caught_up(request)
        best = seen.own.guess(self._most(seen.own.run, most))
        if prod(best.chances) < self._floor:
            best = self._likely(best)
        for place in self._places(request, seen):
            if place.length:
                guess = self._continue(place.text, place.state, place.length, most)
                best = max(best, guess, key=Guess.expected)
        return best

    def forget(self, request: Request) -> None:
        self._seen.pop(request.id, None)
        if self._max_answers and request.num_output:
            answers = self._answers.setdefault(request.cache_salt, Answers())
            self._answers.move_to_end(request.cache_salt)
            if len(self._answers) > MAX_SALTS:
                self._answers.popitem(last=False)
            answers.add(request.output, self._max_answers)

    def _caught_up(self, request: Request) -> Seen:
        seen, tokens = self._seen.get(request.id), request.tokens
        if seen is None:
            before = tokens[max(0, request.num_prompt - OWN_TOKENS) : request.num_prompt]
            own = Followed((), before.tolist())
            seen = self._seen[request.id] = Seen(own, request.num_prompt)
        for at in range(seen.num_seen, len(tokens)):
            seen.own.move(tokens[at])
        seen.num_seen = len(tokens)
        return seen

    def _places(self, request: Request, seen: Seen) -> list[Place]:
        answers = self._answers.get(request.cache_salt)
        if answers is None:
            return []
        places = seen.places
        if not places or places[0].text is not answers.young or places[1].text is not answers.old:
            places = seen.places = [Place(answers.young), Place(answers.old)]
        for place in places:
            if place.text.num_tokens:
                place.move(request.tokens, self._longest)
        return places

    def _most(self, length: int, most: int) -> int:
        """Guesses behind a match of this length."""
        return min(most, int(min(length, self._longest) * self._factor) if self._factor else most)

    def _likely(self, guess: Guess) -> Guess:
        """Up to where it is unlikely on the whole."""
        survival = accumulate(guess.chances, mul)
        num = sum(1 for _ in takewhile(lambda product: product >= self._floor, survival))
        return Guess(guess.chances[:num], guess.tokens[:num])

    def _continue(self, text: SuffixAutomaton, state: int, length: int, most: int) -> Guess:
        """Token by token, while the product of the shares stays above the floor."""
        length = min(length, self._longest)
        most = self._most(length, most)
        tokens: list[int] = []
        chances: list[float] = []
        product = 1.0
        while len(tokens) < most and (found := text.continued(state)) is not None:
            token, share = found
            product *= share
            if product < self._floor or token < 0:
                break
            tokens.append(token)
            # A single earlier place says little where few tokens match.
            chances.append(share * trust(length))
            length += 1
            state = text.next[state][token]
        return Guess(tuple(chances), tuple(tokens)) if tokens else NOTHING
