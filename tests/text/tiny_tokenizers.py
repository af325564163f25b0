"""Small real tokenizers for tests: byte-level BPE, and SentencePiece style with byte fallback."""

from __future__ import annotations

from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "日本語のテキストと絵文字😀😃😄を含む",
    "def main():\n    return 42\n",
    "naïve café, voilà: Ünïcödé",
] * 4

SPECIAL = ["<s>", "</s>", "<pad>"]


@cache
def byte_level() -> Tokenizer:
    """All 256 bytes, some merges, three special tokens and one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Words begin with a visible space; what has no piece is spelled in <0xNN> tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁the", "▁cat", "a", "b", "c", "t", "h", "e", "▁t", "▁c", "é", "日", "."]
    pieces += ["he", "at"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁", "c"), ("h", "e"), ("a", "t"), ("▁t", "he"), ("▁c", "at")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer
