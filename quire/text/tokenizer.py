"""Tokenizer: text to ids and back, chat messages to prompt text, for any model we can load.

A thin face over the `tokenizers` library: it settles what that library leaves to the caller (which
ids end a generation, whether a beginning token is added, the chat template) and offers the names
scripts written for Hugging Face tokenizers call. Streaming text is `detokenize.py`'s job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, overload

import tokenizers
from tokenizers import AddedToken, decoders

from quire.errors import BadRequest, CheckpointError
from quire.text.byte_level import spelled_bytes
from quire.text.encoding import Encoding
from quire.text.messages import Message
from quire.text.special_tokens import SpecialTokens, read_special_tokens
from quire.text.template import ChatTemplate, compile_template

MAX_TOKENIZER_BYTES = 256_000_000
_BPE_WITH_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


class Vocab(Protocol):
    """A loaded vocabulary with its special ids; `GGUFVocab` is one, `FolderVocab` another."""

    @property
    def tokenizer(self) -> tokenizers.Tokenizer: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def unk_id(self) -> int | None: ...
    @property
    def add_bos(self) -> bool | None: ...
    @property
    def add_eos(self) -> bool | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderVocab:
    tokenizer: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    unk_id: int | None
    add_bos: bool | None
    add_eos: bool | None


class Tokenizer:
    """What `llm.get_tokenizer()` returns.

    >>> tokenizer = Tokenizer.from_folder("model")          # doctest: +SKIP
    >>> tokenizer.decode(tokenizer.encode("Hello"))         # doctest: +SKIP
    'Hello'
    """

    def __init__(self, vocab: Vocab, chat_templates: Mapping[str, str] | None = None) -> None:
        self._backend = vocab.tokenizer
        self.bos_id = vocab.bos_id
        self.eos_ids = vocab.eos_ids  # any of these ends a generation; the tokenizer's own first
        self.pad_id = vocab.pad_id
        self.unk_id = vocab.unk_id
        self._token_bytes: dict[int, bytes] = {}
        self._templates = dict(chat_templates or {})
        self._prefix, self._suffix = _affixes(vocab)

    @staticmethod
    def from_folder(path: str | Path) -> Tokenizer:
        """Read tokenizer.json and its companions; raises CheckpointError naming the file."""
        folder = Path(path)
        special = read_special_tokens(folder)
        return Tokenizer(_folder_vocab(_read_backend(folder), special), special.chat_templates)

    @staticmethod
    def from_gguf_vocab(vocab: GGUFVocabLike) -> Tokenizer:
        """Take over the vocabulary a GGUF file carries."""
        template = vocab.chat_template
        return Tokenizer(vocab, {} if template is None else {"default": template})

    # ------------------------------------------------------------ text and ids

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(ids, [1] * len(ids))
        many = self.encode_batch(text, add_special_tokens)
        return Encoding(many, [[1] * len(ids) for ids in many])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises BadRequest for what is not valid text."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise BadRequest(_not_text(text)) from None
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Several texts at once, on all cores."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            return [self.encode(text, add_special_tokens) for text in texts]  # names the culprit
        if not add_special_tokens:
            return [encoding.ids for encoding in encodings]
        return [[*self._prefix, *encoding.ids, *self._suffix] for encoding in encodings]

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids outside the vocabulary decode to nothing."""
        ids = [ids] if isinstance(ids, int) else list(ids)
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise BadRequest(f"cannot decode token ids: {error}") from None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        return self._backend.id_to_token(id) if 0 <= id < 1 << 32 else None

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether each token is a fixed run of bytes, whatever stands beside it."""
        return type(self._backend.decoder) is decoders.ByteLevel

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token of a byte-level vocabulary; none for ids outside of it."""
        known = self._token_bytes.get(id)
        if known is None:
            token = self.id_to_token(id)
            known = self._token_bytes[id] = b"" if token is None else spelled_bytes(token)
        return known

    # ------------------------------------------------------------ chat

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = ...,
        add_generation_prompt: bool = ...,
        *,
        tokenize: Literal[False],
        continue_final_message: bool = ...,
        chat_template: str | None = ...,
        **variables: object,
    ) -> str: ...

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = ...,
        add_generation_prompt: bool = ...,
        *,
        tokenize: Literal[True] = ...,
        continue_final_message: bool = ...,
        chat_template: str | None = ...,
        **variables: object,
    ) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = False,
        *,
        tokenize: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: object,
    ) -> str | list[int]:
        """The prompt for a conversation: ids, or text for `tokenize=False`.

        Raises BadRequest, with the template's own reason. Encode the text with
        `add_special_tokens=False`: templates print those themselves.
        """
        used = self if chat_template is None else self.with_chat_template(chat_template)
        text = used.render_chat(
            messages,
            tools,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The same as text, with the template's variables in a mapping.

        For names that strangers chose: as keywords they could be those of our own parameters.
        """
        text = self._template(bool(tools)).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            variables=variables,
        )
        return _cut_after_final_message(text, messages) if continue_final_message else text

    def check_templates(self) -> None:
        """Raises CheckpointError if one of the chat templates in use does not compile."""
        for name in ("default", "tool_use"):
            if name in self._templates:
                compile_template(self._templates[name])

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same vocabulary with another chat template; raises CheckpointError if it is bad."""
        other = object.__new__(Tokenizer)
        other.__dict__.update(self.__dict__)
        other._templates = {"default": source}
        other._template(False)
        return other

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    def _template(self, has_tools: bool) -> ChatTemplate:
        names = ("tool_use", "default") if has_tools else ("default",)
        source = next((self._templates[name] for name in names if name in self._templates), None)
        if source is None:
            raise BadRequest(
                "this model has no chat template; send a plain prompt, or start with a template "
                "of your own"
            )
        tokens = {
            f"{name}_token": token
            for name in ("bos", "eos", "pad", "unk")
            if (token := self._text_of(getattr(self, f"{name}_token_id"))) is not None
        }
        return ChatTemplate(source, tokens)

    # ------------------------------------------------------------ looking

    def to_json(self) -> str:
        """The vocabulary as the text of a tokenizer.json, for another process or library."""
        return self._backend.to_str()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @cached_property
    def largest_id(self) -> int:
        """Ids need not be the numbers of a count: files can leave gaps."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; models may have more rows than this."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None

    @property
    def pad_token_id(self) -> int | None:
        return self.pad_id

    @property
    def unk_token_id(self) -> int | None:
        return self.unk_id

    @property
    def bos_token(self) -> str | None:
        return self._text_of(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        return self._text_of(self.eos_token_id)

    def _text_of(self, id: int | None) -> str | None:
        return None if id is None else self.id_to_token(id)


class GGUFVocabLike(Vocab, Protocol):
    @property
    def chat_template(self) -> str | None: ...


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = [p.name for p in folder.glob("*token*") if p.suffix in (".model", ".tiktoken")]
        hint = (
            f"; it has {', '.join(sorted(other))}: convert that with transformers" if other else ""
        )
        raise CheckpointError(f"no tokenizer.json in {folder}{hint}")
    if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, want at most {MAX_TOKENIZER_BYTES}")
    data = path.read_bytes()
    if _BPE_WITH_PREFIX.search(data) and b'"BPE"' in data:
        # The library does not survive a prefix its merges do not have; no language model has one.
        raise CheckpointError(f"{path}: BPE with a continuing_subword_prefix is not supported")
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"cannot read {path}: {error}") from error
    # Some files carry the cut-off and padding of a training run.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _folder_vocab(backend: tokenizers.Tokenizer, special: SpecialTokens) -> FolderVocab:
    ids = {name: backend.token_to_id(text) for name, text in special.texts.items()}
    # Being named in the config makes a token special, even if tokenizer.json forgot to say so.
    known = [
        t
        for t in (*special.texts.values(), *special.more_texts)
        if backend.token_to_id(t) is not None
    ]
    listed = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in known if text not in listed]
    )
    eos = ids.get("eos_token")
    eos_ids = dict.fromkeys(((eos,) if eos is not None else ()) + special.eos_ids)
    return FolderVocab(
        tokenizer=backend,
        bos_id=ids.get("bos_token"),
        eos_ids=tuple(eos_ids),
        pad_id=ids.get("pad_token"),
        unk_id=ids.get("unk_token"),
        add_bos=special.add_bos,
        add_eos=special.add_eos,
    )


def _affixes(vocab: Vocab) -> tuple[list[int], list[int]]:
    """The ids put before and after every text: the post-processor's, corrected by the config."""
    probe = "a"
    plain = vocab.tokenizer.encode(probe, add_special_tokens=False).ids
    framed = vocab.tokenizer.encode(probe, add_special_tokens=True).ids
    room = len(framed) - len(plain)
    start = next((i for i in range(room + 1) if framed[i : i + len(plain)] == plain), 0)
    prefix, suffix = framed[:start], framed[start + len(plain) :]
    bos, eos = vocab.bos_id, vocab.eos_ids[0] if vocab.eos_ids else None
    if vocab.add_bos is not None and bos is not None:
        prefix = [bos] * vocab.add_bos + [id for id in prefix if id != bos]
    if vocab.add_eos is not None and eos is not None:
        suffix = [id for id in suffix if id != eos] + [eos] * vocab.add_eos
    return prefix, suffix


def _cut_after_final_message(text: str, messages: Sequence[Message]) -> str:
    content = messages[-1].get("content")
    if isinstance(content, str) and content.strip():
        for final in (content, content.strip()):  # many templates strip what they print
            if (start := text.rfind(final)) >= 0:
                return text[: start + len(final)]
    raise BadRequest(
        "continue_final_message needs a last message whose text the chat template prints",
        param="continue_final_message",
    )


def _not_text(text: object) -> str:
    if isinstance(text, str):
        return "the text holds a lone surrogate, which no encoding can represent"
    return f"got a {type(text).__name__} to encode, want a string"
