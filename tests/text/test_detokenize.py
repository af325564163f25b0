"""Streaming text: pieces joined are the whole decoding, and no piece shows half a character."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from quire.text.byte_level import BYTE_TO_CHAR, spelled_bytes
from quire.text.detokenize import Detokenizer, _BytePieces, _WindowPieces
from quire.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import byte_fallback, byte_level

TEXTS = [
    "hello, the quick brown fox",
    "日本語のテキスト",
    "family 👨‍👩‍👧‍👦 and flags 🇫🇷🇯🇵, then é́ and text",
    "\U0001d518\U0001d52b\U0001d526 \x00 \u200d zero width",
    "��� real replacement characters �",
    "   leading and trailing spaces   \n\n",
]


@dataclass(frozen=True)
class PlainVocab:
    tokenizer: Backend
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    unk_id: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None


BYTES = Tokenizer(PlainVocab(byte_level()))
FALLBACK = Tokenizer(PlainVocab(byte_fallback()))
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["bytes", "fallback"])


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push([i]) for i in ids), detokenizer.flush()]


def in_context(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> str:
    """What the output adds to the prompt's text, an unfinished character in it counted as new."""
    before = tokenizer.decode(prompt, skip).rstrip("�")
    whole = tokenizer.decode([*prompt, *ids], skip)
    assert whole.startswith(before)
    return whole[len(before) :]


@TOKENIZERS
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    prompt = tokenizer.encode("the cat.")
    assert "".join(stream(tokenizer, prompt, ids)) == in_context(tokenizer, prompt, ids, True)
    assert "".join(stream(tokenizer, [], ids)) == tokenizer.decode(ids)


@TOKENIZERS
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b日本語👩‍👧")
    pieces = stream(tokenizer, [], ids)
    assert not any("�" in piece for piece in pieces)
    assert pieces[-1] == ""
    assert len([piece for piece in pieces if piece]) > 5  # and it does stream


@TOKENIZERS
def test_space_between_words_survives_the_start_of_the_output(tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("the"), tokenizer.encode(" cat")
    if tokenizer is FALLBACK:
        ids = [tokenizer.token_to_id("▁cat")]
    assert "".join(stream(tokenizer, prompt, ids)) == " cat"


def test_skipped_special_tokens_do_not_eat_the_next_space() -> None:
    cat, end = FALLBACK.token_to_id("▁cat"), FALLBACK.token_to_id("</s>")
    assert cat is not None and end is not None
    ids = [cat, *[end] * 20, cat]
    assert stream(FALLBACK, [], ids)[-2] == " cat"
    assert "".join(stream(FALLBACK, [], ids, skip=False)) == FALLBACK.decode(ids, False)


def test_character_begun_in_the_prompt_ends_in_the_output() -> None:
    ids = [BYTES.token_to_id(BYTE_TO_CHAR[b]) for b in "😀!".encode()]
    assert "".join(stream(BYTES, ids[:2], ids[2:])) == "😀!"


def test_unfinished_character_comes_out_on_flush() -> None:
    ids = [BYTES.token_to_id(BYTE_TO_CHAR[b]) for b in b"a\xf0\x9f\x98"]
    assert stream(BYTES, [], ids) == ["a", "", "", "", "�"]


def test_impossible_bytes_are_shown_without_waiting() -> None:
    ids = [BYTES.token_to_id(BYTE_TO_CHAR[b]) for b in b"\xff\xfeab"]
    assert stream(BYTES, [], ids) == ["�", "�", "a", "b", ""]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_tokens_of_a_byte_level_vocabulary(data: st.DataObject) -> None:
    token = st.integers(0, BYTES.vocab_size + 3)  # some ids past the end: models have more rows
    prompt, ids = data.draw(st.lists(token, max_size=4)), data.draw(st.lists(token, max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(stream(BYTES, [], ids, skip)) == BYTES.decode(ids, skip)
    if "�" not in BYTES.decode(prompt, skip):
        assert "".join(stream(BYTES, prompt, ids, skip)) == in_context(BYTES, prompt, ids, skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60), st.integers(1, 5))
def test_window_and_bytes_agree(ids: list[int], step: int) -> None:
    """The general way must be right where the exact way can check it, invalid bytes included."""
    texts = []
    for pieces in (_BytePieces(BYTES, []), _WindowPieces(BYTES, [])):
        chunks = [pieces.push(ids[i : i + step]) for i in range(0, len(ids), step)]
        texts.append("".join(chunks) + pieces.flush())
    assert texts[0] == texts[1] == BYTES.decode(ids, False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=6), max_size=8))
def test_fallback_vocabulary_on_any_valid_text(words: list[str]) -> None:
    ids = FALLBACK.encode(" ".join(words))
    assert "".join(stream(FALLBACK, [], ids)) == FALLBACK.decode(ids)


def byte_runs(ids: list[int]) -> list[bytes]:
    names = [FALLBACK.id_to_token(i) or "" for i in ids]
    runs = itertools.groupby(names, key=lambda name: name.startswith("<0x"))
    return [bytes(int(n[3:5], 16) for n in run) for is_byte, run in runs if is_byte]


def is_utf8(data: bytes) -> bool:
    return data.decode("utf-8", "replace").encode() == data


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, FALLBACK.vocab_size - 1), max_size=60))
def test_fallback_vocabulary_on_random_tokens(ids: list[int]) -> None:
    text, whole = "".join(stream(FALLBACK, [], ids, False)), FALLBACK.decode(ids, False)
    if all(map(is_utf8, byte_runs(ids))):
        assert text == whole
    # An invalid run decodes to U+FFFD as a whole; what was shown before it turned bad stays shown,
    # so nothing of the whole decoding is missing.
    rest = iter(text)
    assert all(char in rest for char in whole if char != "�")


@pytest.mark.parametrize("piece", ["\xff", "a", "😀"])
@TOKENIZERS
def test_cost_per_token_does_not_grow(tokenizer: Tokenizer, piece: str) -> None:
    if piece == "\xff":  # never a character: must not pile up
        name = BYTE_TO_CHAR[0xFF] if tokenizer is BYTES else "<0xFF>"
        ids = [tokenizer.token_to_id(name)] * 4000
    else:
        ids = tokenizer.encode(piece * 2000)[:4000]
    begin = time.thread_time()
    stream(tokenizer, [], ids)
    assert time.thread_time() - begin < 4.0  # measured: 0.1; decoding everything anew takes 60


def test_spelled_bytes_cover_every_byte() -> None:
    assert {spelled_bytes(char) for char in BYTE_TO_CHAR.values()} == {
        bytes([b]) for b in range(256)
    }
    assert spelled_bytes("<|日本|>") == "<|日本|>".encode()
