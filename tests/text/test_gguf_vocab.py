"""Tokenizers rebuilt from GGUF metadata, against trained originals and a plain SentencePiece.

Text that is cut wrongly still encodes and decodes; only comparing tokens shows it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from quire.errors import CheckpointError
from quire.text.gguf_vocab import tokenizer_from_gguf

STRINGS = [
    "x =  12",
    "plain words, and more words.",
    "2024-01-31: 1234567 + 89 = 3.14159",
    "naïve café, Ærøskøbing, e\u0301",
    "日本語のテキスト、かな",
    "🦊🚀 emoji 👩‍👩‍👧 family",
    "def f(x):\n    return x ** 2  # two\n\n\tif not x:\r\n        pass",
    "a      b\t\tc   ",
    "   leading",
    "I'll say it's 'fine', WE'LL see",
    "\n\n \n",
    "",
]
CORPUS = [*STRINGS, "x = 12 x = 34 a  b  c =  56 the word the words 100 1000 12 123", *STRINGS] * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(use_regex: bool) -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(CONTRACTIONS + digits + REST)
    cut = pre_tokenizers.Split(pattern, "isolated")
    return pre_tokenizers.Sequence([cut, byte_level(False)])


def digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level(True)]
    )


ORIGINALS = {
    "gpt-2": lambda: byte_level(True),
    "default": lambda: byte_level(True),
    "smollm": digits,
    "qwen2": lambda: split(r"\p{N}"),
    "llama-bpe": lambda: split(r"\p{N}{1,3}"),
}


def trained(pre: str) -> Tokenizer:
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = ORIGINALS[pre]()
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    original.train_from_iterator(CORPUS, trainer)
    return original


def metadata_of(original: Tokenizer, pre: str | None) -> dict[str, Any]:
    model = json.loads(original.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if t in SPECIAL else 1 for t in tokens], "i4"),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata if pre is None else metadata | {"tokenizer.ggml.pre": pre}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_byte_level_equals_the_original(pre: str) -> None:
    original = trained(pre)
    tokenizer = tokenizer_from_gguf(metadata_of(original, pre)).tokenizer
    for text in STRINGS:
        ours = tokenizer.encode(text, add_special_tokens=False)
        assert ours.tokens == original.encode(text).tokens, text
        want = text.replace("e\u0301", "é") if pre == "qwen2" else text
        assert tokenizer.decode(ours.ids) == want


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["x", "Ġ=", "ĠĠ", "1", "2"]),
        ("qwen2", ["x", "Ġ=", "Ġ", "Ġ", "1", "2"]),
        ("llama-bpe", ["x", "Ġ=", "Ġ", "Ġ", "12"]),
        ("gpt-2", ["x", "Ġ=", "Ġ", "Ġ12"]),
    ],
)
def test_digits_and_spaces_are_cut_as_named(pre: str, tokens: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(metadata_of(trained(pre), pre)).tokenizer
    assert tokenizer.encode("x =  12", add_special_tokens=False).tokens == tokens


def test_special_tokens_and_what_is_said_about_them() -> None:
    metadata = metadata_of(trained("smollm"), "smollm") | {
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ x }}",
    }
    vocab = tokenizer_from_gguf(metadata)
    assert (vocab.bos_id, vocab.eos_ids, vocab.pad_id, vocab.unk_id) == (1, (2, 0), 2, 0)
    assert (vocab.add_bos, vocab.add_eos, vocab.chat_template) == (False, False, "{{ x }}")
    assert vocab.special_ids == {0, 1, 2}
    ids = vocab.tokenizer.encode("<|im_start|>x<|im_end|>").ids
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert vocab.tokenizer.decode(ids) == "x"
    assert vocab.tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>x<|im_end|>"


def test_bos_and_eos_are_added_when_the_file_says_so() -> None:
    metadata = metadata_of(trained("llama-bpe"), "llama-bpe")
    vocab = tokenizer_from_gguf(metadata)
    assert vocab.add_bos  # Llama 3 files often leave the flag out
    assert vocab.tokenizer.encode("x").tokens == ["<|im_start|>", "x"]
    vocab = tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_eos_token": True})
    assert vocab.tokenizer.encode("x").tokens == ["<|im_start|>", "x", "<|im_end|>"]
    assert vocab.tokenizer.encode("x", add_special_tokens=False).tokens == ["x"]


def test_user_defined_tokens_match_whole_and_are_shown() -> None:
    metadata = metadata_of(trained("gpt-2"), None)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<think>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"].tolist(), 4]
    vocab = tokenizer_from_gguf(metadata)
    encoded = vocab.tokenizer.encode("x<think>x")
    assert encoded.tokens == ["x", "<think>", "x"]
    assert vocab.tokenizer.decode(encoded.ids) == "x<think>x"
    assert encoded.ids[1] not in vocab.special_ids


def test_absent_ids_are_tolerated() -> None:
    metadata = metadata_of(trained("gpt-2"), None)
    del metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    del metadata["tokenizer.ggml.token_type"]
    vocab = tokenizer_from_gguf(metadata)
    assert (vocab.bos_id, vocab.eos_ids, vocab.pad_id, vocab.unk_id) == (None, (), None, None)
    assert vocab.special_ids == frozenset()


PIECES = [
    "▁", "e", "t", "a", "o", "n", "h", "x", "=", "1", "2", "▁t", "he", "▁the", "▁a", "an", "on",
    "▁▁", "▁▁▁▁", "▁▁▁", "▁=", "▁x", "the", "then", "▁then", "日", "本", "日本",
]  # fmt: skip


def sentencepiece() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(
            [0.0] * 259 + [-float(i) for i in range(len(PIECES))], "f4"
        ),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(PIECES), "i4"),
    }


def plain_sentencepiece(text: str) -> list[str]:
    """Join the neighbours that make the best-scored piece, leftmost first, until none do."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [
            (PIECES.index(a + b), i)
            for i, (a, b) in enumerate(pairwise(symbols))
            if a + b in PIECES
        ]
        if not joins:
            break
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    out: list[str] = []
    for symbol in symbols:
        out += [symbol] if symbol in PIECES else [f"<0x{b:02X}>" for b in symbol.encode()]
    return out


@pytest.mark.parametrize("text", [s for s in STRINGS if s] + ["the then an anon", "x =       12"])
def test_sentencepiece(text: str) -> None:
    vocab = tokenizer_from_gguf(sentencepiece())
    encoded = vocab.tokenizer.encode(text)
    assert encoded.tokens == ["<s>", *plain_sentencepiece(text)]
    assert vocab.tokenizer.decode(encoded.ids) == text
    assert (vocab.bos_id, vocab.eos_ids, vocab.unk_id, vocab.add_bos) == (1, (2,), 0, True)


def test_sentencepiece_without_the_space_prefix() -> None:
    metadata = sentencepiece() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = tokenizer_from_gguf(metadata).tokenizer
    assert tokenizer.encode("the an", add_special_tokens=False).tokens == ["the", "▁a", "n"]
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "t5"}, "known tokenizers: gpt2, llama"),
    "no model": ({"model": None}, "known tokenizers"),
    "pre": ({"pre": "tekken"}, "'tekken'.*known: default, gpt-2.*smollm, qwen2, llama-bpe"),
    "no tokens": ({"tokens": []}, "1 to"),
    "tokens": ({"tokens": np.zeros(3)}, "list of strings"),
    "twice": ({"tokens": ["a", "b", "a"]}, "'a': appears twice"),
    "types": ({"token_type": [1, 2]}, "= 2: want one number for each"),
    "merges": ({"merges": ["q zz"]}, "'q zz'"),
    "merge without space": ({"merges": ["x"]}, "'x'"),
    "bos": ({"bos_token_id": 10**6}, "1000000"),
    "negative": ({"eos_token_id": -1}, "-1"),
    "id as text": ({"padding_token_id": "2"}, "padding_token_id"),
    "flag": ({"add_bos_token": 1}, "want a bool"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_metadata_is_named(name: str) -> None:
    change, says = WRONG[name]
    metadata = metadata_of(trained("gpt-2"), "gpt-2")
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=says) as error:
        tokenizer_from_gguf(metadata, "some.gguf")
    assert "some.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("scores", None, "scores"),
        ("scores", [0.0] * 5, "= 5: want one number"),
        ("scores", [float("nan")] * (259 + len(PIECES)), "finite"),
    ],
)
def test_wrong_scores_are_named(key: str, value: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        tokenizer_from_gguf(sentencepiece() | {f"tokenizer.ggml.{key}": value})


def test_a_piece_too_long_to_split_is_refused() -> None:
    metadata = sentencepiece()
    metadata["tokenizer.ggml.tokens"][-1] = "x" * 100_000
    with pytest.raises(CheckpointError, match="at most 256"):
        tokenizer_from_gguf(metadata)


def test_real_file(default_model_path: Path) -> None:
    from quire.load.gguf import GGUFFile

    vocab = tokenizer_from_gguf(GGUFFile.open(default_model_path).metadata)
    assert vocab.tokenizer.encode("x =  12").tokens == ["x", "Ġ=", "ĠĠ", "1", "2"]
    for text in STRINGS:
        assert vocab.tokenizer.decode(vocab.tokenizer.encode(text).ids) == text
