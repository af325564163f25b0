"""The tokenizer a GGUF file carries in its metadata, rebuilt as a `tokenizers.Tokenizer`.

Two families. `gpt2`: byte-level BPE with its merges listed; the file only *names* how text is cut
before merging (`tokenizer.ggml.pre`), so an unknown name is an error, never a guess that would
tokenise almost right. `llama`: SentencePiece BPE, which has scores instead of merges; joining two
pieces is allowed whenever the result is a piece, best score first, so the merges are every split of
every piece in that order. Chat templates are handed on as text, not run here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from quire.errors import CheckpointError

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_MAX_TOKENS = 1 << 20
_MAX_PIECE_CHARS = 256  # deriving merges costs length squared; real pieces stay below 100
_SPACE = "\u2581"  # how SentencePiece writes a space

# How GPT-4-like models cut text; they differ in how many digits go together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Cut:
    """What `tokenizer.ggml.pre` stands for."""

    split: str | None = None  # a regex; None for GPT-2's own
    single_digits: bool = False
    nfc: bool = False
    # A word that is a token as a whole is taken as it is, whatever the merges would make of it.
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = _Cut()
_LLAMA3 = _Cut(split=_WORDS % r"\p{N}{1,3}", whole_words=True, adds_bos=True)
_CUTS: dict[str, _Cut] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "smollm": _Cut(single_digits=True),
    "qwen2": _Cut(split=_WORDS % r"\p{N}", nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


@dataclass(frozen=True, slots=True)
class GGUFVocab:
    """A tokenizer and what its metadata says about it.

    `tokenizer.encode(text)` already adds bos and eos where `add_bos` and `add_eos` say so;
    `encode(text, add_special_tokens=False)` leaves them out, as for a rendered chat template.
    """

    tokenizer: Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]  # any of them ends a reply; the file's own eos comes first
    pad_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    special_ids: frozenset[int]  # never shown: control tokens, bos, eos, unknown


def tokenizer_from_gguf(metadata: Mapping[str, object], source: str = "GGUF file") -> GGUFVocab:
    """Raises CheckpointError, naming `source`, when the metadata is missing or contradictory."""
    fields = _Fields(metadata, source)
    tokens = fields.tokens()
    types = fields.types(len(tokens))
    kind = fields.text("model")
    if kind == "gpt2":
        cut = fields.cut()
        tokenizer, adds_bos, defaults = _byte_level(fields, tokens, cut), cut.adds_bos, _NO_IDS
    elif kind == "llama":
        tokenizer, adds_bos, defaults = _sentencepiece(fields, tokens, types), True, _LLAMA_IDS
    else:
        raise fields.error("model", kind, "known tokenizers: gpt2, llama")
    bos = fields.token_id("bos", len(tokens), defaults.get("bos"))
    ends = [fields.token_id(role, len(tokens), defaults.get(role)) for role in _END_ROLES]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    add_bos = fields.flag("add_bos_token", adds_bos) and bos is not None
    add_eos = fields.flag("add_eos_token", False) and ends[0] is not None
    special = {i for i, t in enumerate(types) if t in (_CONTROL, _UNKNOWN)}
    special.update(eos_ids, () if bos is None else (bos,))
    _add_tokens(tokenizer, tokens, types, special)
    _add_frame(tokenizer, tokens, bos if add_bos else None, ends[0] if add_eos else None)
    return GGUFVocab(
        tokenizer=tokenizer,
        bos_id=bos,
        eos_ids=eos_ids,
        pad_id=fields.token_id("padding", len(tokens), None),
        unk_id=fields.token_id("unknown", len(tokens), defaults.get("unknown")),
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=fields.chat_template(),
        special_ids=frozenset(special),
    )


_END_ROLES = ("eos", "eot", "eom")
_NO_IDS: Mapping[str, int] = {}
_LLAMA_IDS: Mapping[str, int] = {"unknown": 0, "bos": 1, "eos": 2}  # SentencePiece's own


class _Fields:
    """Typed, checked reads of `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def error(self, key: str, value: object, reason: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        fix = "convert the model again or give it a tokenizer.json"
        return CheckpointError(f"{self._source}: {_PREFIX}{key} = {shown}: {reason}; {fix}")

    def get(self, key: str) -> object:
        return self._metadata.get(_PREFIX + key)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, value, "want a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, value, "want a bool")
        return default if value is None else value

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
            raise self.error(key, value, "want a list of strings")
        return value

    def tokens(self) -> list[str]:
        tokens = self.strings("tokens")
        if not 0 < len(tokens) <= _MAX_TOKENS:
            raise self.error("tokens", len(tokens), f"want 1 to {_MAX_TOKENS} tokens")
        if len(set(tokens)) < len(tokens):
            twice, _ = Counter(tokens).most_common(1)[0]
            raise self.error("tokens", twice, "appears twice, so its id is not certain")
        return tokens

    def numbers(self, key: str, count: int) -> list[float]:
        """One finite number per token; metadata arrays are numpy's, or plain lists in tests."""
        value = self.get(key)
        listed: object = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(listed, list) or len(listed) != count:
            size = len(listed) if isinstance(listed, list) else listed
            raise self.error(key, size, f"want one number for each of the {count} tokens")
        for number in listed:
            if type(number) not in (int, float) or not math.isfinite(number):
                raise self.error(key, number, "want finite numbers")
        return listed

    def types(self, count: int) -> Sequence[float]:
        return (
            [_NORMAL] * count
            if self.get("token_type") is None
            else self.numbers("token_type", count)
        )

    def token_id(self, role: str, count: int, default: int | None) -> int | None:
        value = self.get(f"{role}_token_id")
        if value is None:
            return default if default is not None and default < count else None
        if type(value) is not int or not 0 <= value < count:
            raise self.error(f"{role}_token_id", value, f"want a token id below {count}")
        return value

    def cut(self) -> _Cut:
        name = self.text("pre") or "default"
        if (cut := _CUTS.get(name)) is None:
            raise self.error("pre", name, f"unknown way to cut text; known: {', '.join(_CUTS)}")
        return cut

    def chat_template(self) -> str | None:
        value = self._metadata.get("tokenizer.chat_template")
        if value is not None and not isinstance(value, str):
            raise self.error("chat_template", value, "want a string")
        return value


def _byte_level(fields: _Fields, tokens: Sequence[str], cut: _Cut) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for line in fields.strings("merges"):
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise fields.error("merges", line, "joins or makes what is not a token")
        merges.append((left, right))
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=cut.whole_words))
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.split is not None:
        steps.append(pre_tokenizers.Split(Regex(cut.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: _Fields, tokens: Sequence[str], types: Sequence[float]) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = fields.numbers("scores", len(tokens))
    pieces = {t: scores[i] for t, i in vocab.items() if types[i] == _NORMAL}
    if pieces and (longest := max(map(len, pieces))) > _MAX_PIECE_CHARS:
        raise fields.error("tokens", longest, f"pieces have at most {_MAX_PIECE_CHARS} characters")
    unknown = fields.token_id("unknown", len(tokens), _LLAMA_IDS["unknown"])
    assert unknown is not None  # id 0 exists: there is at least one token
    model = BPE(
        vocab=vocab,
        merges=_derive_merges(pieces, vocab),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in types,
    )
    tokenizer = Tokenizer(model)
    has_prefix = fields.flag("add_space_prefix", True)
    spell: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    undo: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if has_prefix:
        spell.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spell)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _derive_merges(pieces: Mapping[str, float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every split of every piece into two pieces, best-scored piece first."""
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=lambda p: (-pieces[p], vocab[p])):
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        joins = [(left, right) for left, right in splits if left in pieces and right in pieces]
        merges += sorted(joins, key=lambda join: (vocab[join[0]], vocab[join[1]]))
    return merges


def _add_tokens(
    tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[float], special: set[int]
) -> None:
    """Makes these match as a whole in any text. All are in the vocabulary, so ids stay."""
    control = [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special)]
    tokenizer.add_special_tokens(control)
    plain = [i for i, t in enumerate(types) if t == _USER_DEFINED and i not in special]
    tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in plain])


def _add_frame(
    tokenizer: Tokenizer, tokens: Sequence[str], bos: int | None, eos: int | None
) -> None:
    if bos is None and eos is None:
        return
    # Pieces go by role: a token's own text could hold the template's ":" or "$".
    single = ["bos"] * (bos is not None) + ["$A"] + ["eos"] * (eos is not None)
    ends = [(role, i) for role, i in (("bos", bos), ("eos", eos)) if i is not None]
    tokenizer.post_processor = TemplateProcessing(
        single=single,
        special_tokens=[{"id": role, "ids": [i], "tokens": [tokens[i]]} for role, i in ends],
    )
