"""SamplingParams: what a caller may ask of one generation; it validates itself.

Names and defaults follow vLLM's class of the same name, so scripts move over by changing an import.
Fields may be assigned. `LLM` takes a copy with every call (`clone`): it is checked anew, and nobody
changes it. Everything here is plain data: the tensors made from it live in `sample/`, the
grammars made from StructuredOutputsParams in `grammar/`.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import NoReturn

from quire.errors import BadRequest

MAX_LOGPROBS = 64
MAX_N = 256
MAX_STOPS = 64
MAX_BIASED_TOKENS = 1024
# What a request that does not generate comes back with: the mean of its hidden states, the last
# one, or what the model's classification head makes of the last one.
POOLINGS = ("mean", "last", "classify")
CONTAINERS = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words")
GRAMMAR_KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the whole output must match: exactly one of the five.

    A schema given as a dict is stored as JSON text and choices as a tuple, so that the value is
    hashable and comes through a wire as it went in. Sizes are `grammar/spec.py`'s to judge.

    >>> StructuredOutputsParams(json={"type": "integer"}).json
    '{"type": "integer"}'
    """

    json: str | dict[str, object] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark, or EBNF as in llama.cpp (GBNF)
    json_object: bool = False  # any JSON object

    def __post_init__(self) -> None:
        given = [name for name in GRAMMAR_KINDS if getattr(self, name) is not None]
        if not isinstance(self.json_object, bool):
            _refuse("json_object", self.json_object, "True or False")
        given += ["json_object"] * self.json_object
        if len(given) != 1:
            wanted = f"exactly one of {', '.join(GRAMMAR_KINDS)} or json_object=True"
            _refuse("structured_outputs", given, wanted)
        if isinstance(self.json, dict):
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and _is_text(value)):
                kind = type(value).__name__
                _refuse(name, kind, "text" if name != "json" else "a JSON schema, text or dict")
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choices(self.choice))

    @property
    def kind(self) -> str:
        """The name of the field that was given."""
        found = (name for name in GRAMMAR_KINDS if getattr(self, name) is not None)
        return next(found, "json_object")


def _schema_text(schema: dict[str, object]) -> str:
    try:
        return json_text.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        _refuse("json", "a dict", f"a schema that JSON can hold ({error})")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _checked_choices(choice: object) -> tuple[str, ...]:
    if not isinstance(choice, (list, tuple)) or not choice:
        _refuse("choice", type(choice).__name__, "a list of at least one text")
    bad = [c for c in choice if not isinstance(c, str) or not c or not _is_text(c)]
    if bad:
        _refuse("choice", bad[:1], "non-empty texts only")
    return tuple(choice)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling wishes.

    >>> params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)
    >>> params.temperature = 0.0
    >>> params.is_greedy
    True
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: as far as the context goes
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None  # keep the last so many; -1: what the model can take
    logits_processors: None = None  # as in vLLM's class; nothing else is taken
    extra_args: dict[str, int] | None = None  # vLLM's place for num_speculative_tokens
    num_speculative_tokens: int | None = None  # most drafts in a step; 0: none; None: the engine's
    pooling: str | None = None  # one of POOLINGS: the answer is numbers, and not text
    # Filled by the text layer: bad_words as token sequences; users pass bad_words.
    bad_word_ids: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.pooling is not None:
            # The one token drawn ends the request; nobody reads it.
            self.max_tokens = 1
        if self.extra_args is not None:
            _take_extra(self)
        for check in (_check_counts, _check_ranges, _check_lists, _check_task):
            check(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def with_(self, **changes: object) -> SamplingParams:
        """A changed copy; unknown names raise BadRequest with the known ones."""
        known = {f.name for f in fields(self)}
        if unknown := set(changes) - known:
            raise BadRequest(
                f"unknown sampling parameter {sorted(unknown)}; known: {sorted(known)}"
            )
        return replace(self, **changes)  # type: ignore[arg-type]

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this one. Raises BadRequest for a bad field."""
        given = ((name, getattr(self, name)) for name in CONTAINERS)
        return replace(self, **{name: copy(value) for name, value in given if value is not None})


# Fields of vLLM's class that change nothing at None, and what to do instead of anything else.
UNSUPPORTED = {
    "logits_processors": "the sampler runs no code of the caller's; use logit_bias,"
    " allowed_token_ids, bad_words or structured_outputs",
}

GREEDY_BELOW = 1e-5  # temperatures under this mean argmax, as in vLLM


def _refuse(name: str, value: object, want: str) -> NoReturn:
    raise BadRequest(f"got {name}={value!r}, want {want}", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _take_extra(p: SamplingParams) -> None:
    extra = p.extra_args
    if not isinstance(extra, dict) or extra.keys() != {"num_speculative_tokens"}:
        _refuse("extra_args", extra, "None or a dict of num_speculative_tokens; no plugin is here")
    depth = extra["num_speculative_tokens"]
    if p.num_speculative_tokens not in (None, depth):
        _refuse("extra_args", extra, f"num_speculative_tokens={p.num_speculative_tokens} or none")
    p.num_speculative_tokens = depth


def _check_counts(p: SamplingParams) -> None:
    if not _is_int(p.n) or not 1 <= p.n <= MAX_N:
        _refuse("n", p.n, f"a whole number from 1 to {MAX_N}")
    if p.max_tokens is not None and (not _is_int(p.max_tokens) or p.max_tokens < 1):
        _refuse(
            "max_tokens", p.max_tokens, "a whole number >= 1, or None for the rest of the context"
        )
    if not _is_int(p.min_tokens) or p.min_tokens < 0:
        _refuse("min_tokens", p.min_tokens, "a whole number >= 0")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        _refuse("min_tokens", p.min_tokens, f"at most max_tokens={p.max_tokens}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(p, name)
        if value is not None and (not _is_int(value) or not 0 <= value <= MAX_LOGPROBS):
            _refuse(name, value, f"None or a whole number from 0 to {MAX_LOGPROBS}")
    cut = p.truncate_prompt_tokens
    if cut is not None and (not _is_int(cut) or (cut < 1 and cut != -1)):
        wanted = "None, a whole number >= 1, or -1 for what the model can take"
        _refuse("truncate_prompt_tokens", cut, wanted)
    depth = p.num_speculative_tokens
    if depth is not None and (not _is_int(depth) or depth < 0):
        _refuse("num_speculative_tokens", depth, "None or a whole number >= 0; 0: no drafts")
    if p.n > 1 and p.is_greedy:
        _refuse("n", p.n, "1 when temperature is 0: every copy would be the same")


def _check_ranges(p: SamplingParams) -> None:
    for name, low, high in (
        ("temperature", 0.0, 100.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("min_p", 0.0, 1.0),
    ):
        value = getattr(p, name)
        if not isinstance(value, (int, float)) or not low <= value <= high:
            _refuse(name, value, f"a number from {low} to {high}")
    if not isinstance(p.top_p, (int, float)) or not 0.0 < p.top_p <= 1.0:
        _refuse("top_p", p.top_p, "a number in (0, 1]")
    if not _is_int(p.top_k) or not -1 <= p.top_k < 2**31:
        _refuse("top_k", p.top_k, "a whole number from 1 to 2**31 - 1, or 0 or -1 for off")
    if not isinstance(p.repetition_penalty, (int, float)) or not 0.0 < p.repetition_penalty <= 10.0:
        _refuse("repetition_penalty", p.repetition_penalty, "a number in (0, 10]")
    if p.seed is not None and (not _is_int(p.seed) or not -(2**63) <= p.seed < 2**63):
        _refuse("seed", p.seed, "None or a 64-bit whole number")


def _check_lists(p: SamplingParams) -> None:
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        value = getattr(p, name)
        if value is not None and not isinstance(value, (list, tuple, set, frozenset)):
            if name == "stop" and isinstance(value, str):
                continue
            _refuse(name, value, "None or a list")
    stops = p.stop_strings
    if len(stops) > MAX_STOPS or any(not isinstance(s, str) or not s for s in stops):
        _refuse("stop", p.stop, f"up to {MAX_STOPS} non-empty strings")
    if stops and not p.detokenize:
        _refuse("stop", p.stop, "no stop strings when detokenize=False; use stop_token_ids")
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(p, name)
        if ids is not None and any(not _is_int(i) or i < 0 for i in ids):
            _refuse(name, ids, "token ids >= 0")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        _refuse("allowed_token_ids", p.allowed_token_ids, "None or at least one token id")
    if p.bad_words is not None and any(not isinstance(w, str) or not w for w in p.bad_words):
        _refuse("bad_words", p.bad_words, "non-empty strings")
    _check_bias(p.logit_bias)


def _check_task(p: SamplingParams) -> None:
    for name, way_out in UNSUPPORTED.items():
        if getattr(p, name) is not None:
            _refuse(name, getattr(p, name), f"None: {way_out}")
    wanted = p.structured_outputs
    if wanted is not None and not isinstance(wanted, StructuredOutputsParams):
        _refuse("structured_outputs", wanted, "None or StructuredOutputsParams(...)")
    if p.pooling is None:
        return
    if p.pooling not in POOLINGS:
        _refuse("pooling", p.pooling, f"None or one of {', '.join(POOLINGS)}")
    if p.n != 1 or wanted is not None:
        _refuse("pooling", p.pooling, "n=1 and no structured_outputs beside it")


def _check_bias(bias: object) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        _refuse("logit_bias", bias, "None or a dict of token id to bias")
    if len(bias) > MAX_BIASED_TOKENS:
        _refuse("logit_bias", f"{len(bias)} entries", f"at most {MAX_BIASED_TOKENS}")
    for token, value in bias.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not _is_int(token) or token < 0 or not is_number or not -100.0 <= value <= 100.0:
            _refuse("logit_bias", {token: value}, "token ids >= 0 with a bias from -100 to 100")


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """The wishes of `LLM.beam_search`; names and defaults as in vLLM.

    >>> BeamSearchParams(beam_width=4, max_tokens=32).num_candidates
    8
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0  # above 1 favours long answers

    def __post_init__(self) -> None:
        most = MAX_LOGPROBS // 2
        if not _is_int(self.beam_width) or not 1 <= self.beam_width <= most:
            _refuse("beam_width", self.beam_width, f"a whole number from 1 to {most}")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            _refuse("max_tokens", self.max_tokens, "a whole number >= 1")
        penalty = self.length_penalty
        if not isinstance(penalty, (int, float)) or not -10.0 <= penalty <= 10.0:
            _refuse("length_penalty", penalty, "a number from -10 to 10")

    @property
    def num_candidates(self) -> int:
        """Continuations looked at for each beam: enough even if one of each pair is an end."""
        return 2 * self.beam_width
