"""GrammarCompiler and Matcher: a grammar compiled once, and one request's place in it.

A compiled grammar is a template that matchers copy, so requests with equal wishes share the work.
A matcher accepts the tokens its request was given and says, as one bit for each token, which may
come next. It fails alone: after a GrammarError it repeats that error and answers nothing else.
Free of torch; `runner/masks.py` brings the bits to the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from quire.errors import BadRequest, NotSupported, QuireError
from quire.grammar.spec import PARAM, brief, grammar_text, require_llguidance
from quire.params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Words = NDArray[np.int32]  # bit i of the row is token i, least significant first

CACHED_GRAMMARS = 64
LIBRARY_ERRORS = (ValueError, RuntimeError, TypeError, OverflowError)  # for misuse; none expected


class GrammarError(QuireError):
    """One request's grammar cannot go on; the message may be shown to its client."""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def parser_limits() -> LLParserLimits:
    """Bounds on what one grammar may cost; with these a mask takes some 20 ms at the very worst."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,  # 20 ms of building regular expressions
        step_lexer_fuel=200_000,  # 14 ms of a mask
        step_max_items=50_000,  # 3 ms of a mask
        max_lexer_states=50_000,  # of 1 to 2 kB each
        max_grammar_size=500_000,
        verbose_errors=False,  # they would print the grammar into messages
    )


@dataclass(slots=True)
class Compiled:
    template: LLMatcher  # never advanced, only copied
    vocab_size: int  # of the model
    num_words: int  # of llguidance's masks, which cover both vocabularies
    # Copies share what the lexer learned, and so its limits: once it hit one, start afresh.
    is_spent: bool = False


class Matcher:
    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._state = compiled.template.deep_copy()
        self._error: str | None = None
        self._scratch: Words | None = None  # for masks that are wider than the model's vocabulary
        if compiled.num_words != num_words(compiled.vocab_size):
            self._scratch = np.empty(compiled.num_words, np.int32)

    @property
    def is_finished(self) -> bool:
        """Nothing but an end-of-sequence token may follow."""
        return self._error is not None or self._state.is_stopped()

    def restart(self, output: Sequence[int] = ()) -> None:
        """Back to the start, then over the tokens drawn so far; raises GrammarError."""
        self._state = self._compiled.template.deep_copy()
        self._error = None
        for token in output:
            self.accept(token)

    def fork(self) -> Matcher:
        """Another one at the same place: where drafts lead leaves this one as it is."""
        made = Matcher.__new__(Matcher)
        made._compiled, made._error, made._scratch = self._compiled, self._error, self._scratch
        made._state = self._state.deep_copy()  # two microseconds
        return made

    def forced(self) -> list[int]:
        """Tokens that must come next, whatever the model says; often none are known."""
        if self._error is not None or self._state.is_stopped():
            return []
        return list(self._state.compute_ff_tokens())

    def accept(self, token: int) -> None:
        """Advance by one drawn token; after the end of the grammar nothing more is judged."""
        self._raise_known()
        if self._state.is_stopped():
            return
        try:
            if not self._state.consume_token(token):
                self._fail(self._state.get_error())
        except LIBRARY_ERRORS as error:
            self._fail(str(error))

    def fill(self, row: Words) -> None:
        """Write [ceil(vocab / 32)] words of what may come next; raises GrammarError."""
        self._raise_known()
        target = row if self._scratch is None else self._scratch
        assert target.flags.c_contiguous and target.dtype == np.int32
        try:
            self._state.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        except LIBRARY_ERRORS as error:
            self._fail(str(error))
        if self._state.is_error():
            self._compiled.is_spent = True
            self._fail(self._state.get_error())
        self._cut_to_model(row)
        if not row.any():
            self._fail("no token of this model can continue the output")

    def _cut_to_model(self, row: Words) -> None:
        """The tokenizer may have more tokens than the model has rows."""
        if self._scratch is not None:
            row[:] = self._scratch[: len(row)]
        if spare := self._compiled.vocab_size % 32:
            row[-1] &= (1 << spare) - 1

    def _raise_known(self) -> None:
        if self._error is not None:
            raise GrammarError(self._error)

    def _fail(self, reason: str) -> NoReturn:
        self._error = f"the grammar cannot continue: {brief(reason)}"
        raise GrammarError(self._error)


class GrammarCompiler:
    """Compiles for one model, remembering recent grammars. Not for several threads at once.

    `read_tokenizer` gives the text of a tokenizer.json; it is called when the first grammar comes.
    """

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        vocab_size: int,
        eos_ids: Iterable[int],
        max_cached: int = CACHED_GRAMMARS,
    ) -> None:
        self._read_tokenizer, self.vocab_size = read_tokenizer, vocab_size
        self.max_cached = max_cached
        self.eos_ids = sorted(i for i in set(eos_ids) if 0 <= i < vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._cache: OrderedDict[StructuredOutputsParams, Compiled] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """A matcher at its start. Raises BadRequest with the reason, or NotSupported."""
        compiled = self._cache.get(params)
        if compiled is None or compiled.is_spent:
            compiled = self._cache[params] = self._compile(params)
        self._cache.move_to_end(params)
        if len(self._cache) > self.max_cached:
            self._cache.popitem(last=False)
        return Matcher(compiled)

    def _compile(self, params: StructuredOutputsParams) -> Compiled:
        require_llguidance()
        from llguidance import LLMatcher

        tokenizer = self.load()
        template = LLMatcher(tokenizer, grammar_text(params), log_level=0, limits=parser_limits())
        if template.is_error():
            raise BadRequest(
                f"cannot compile structured_outputs.{params.kind}: {brief(template.get_error())}",
                param=PARAM,
            )
        compiled = Compiled(template, self.vocab_size, num_words(tokenizer.vocab_size))
        try:
            self._probe(compiled)
        except GrammarError as error:
            raise BadRequest(str(error), param=PARAM) from None
        return compiled

    def _probe(self, compiled: Compiled) -> None:
        """Three masks: at the start, after a token, and at the start with what those used up.

        The first mask is the dearest by far; most grammars that are too large show it here.
        """
        row = np.empty(num_words(self.vocab_size), np.int32)
        matcher = Matcher(compiled)
        matcher.fill(row)
        tokens = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        first = next((token for token in tokens if token not in self.eos_ids), None)
        if first is not None:
            matcher.accept(first)
            matcher.fill(row)
        Matcher(compiled).fill(row)

    def load(self) -> LLTokenizer:
        """Build the token trie, which takes a second for a large vocabulary; once."""
        if self._tokenizer is None:
            if not self.eos_ids:
                raise NotSupported(
                    "structured outputs need a model with an end-of-sequence token; this one"
                    " names none"
                )
            self._tokenizer = _token_trie(self._read_tokenizer(), self.vocab_size, self.eos_ids)
        return self._tokenizer


def _token_trie(tokenizer_json: str, vocab_size: int, eos_ids: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos_ids)
    except ValueError:
        pass  # most likely the tokenizer has more tokens than the model; if not, the next tells
    try:
        return LLTokenizer(tokenizer_json, eos_token=eos_ids)
    except ValueError as error:
        raise NotSupported(
            f"structured outputs cannot use this model's tokenizer: {brief(str(error))}"
        ) from None
