"""Drafters of another vocabulary: tokens are told by their strings."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.text.shared_tokens import SharedTokens, are_alike, token_string
from quire.text.tokenizer import Tokenizer
from tests.spec.cases import answer, everyone, open_tiny, sampling

EXTRA = 42  # tokens of the drafter that the target does not have


def turned(source: Path, folder: Path, dropped: int) -> Path:
    """The same model with its tokens in another order, some more of them, and some left out."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    order = torch.randperm(len(vocab), generator=torch.Generator().manual_seed(1)).tolist()
    kept = [id for id in order if id < 2 or id >= 2 + dropped]
    at = {old: new for new, old in enumerate(kept)}
    names = {id: token for token, id in vocab.items()}
    own = {names[old]: new for old, new in at.items()}
    own |= {f"extra{i}": len(at) + i for i in range(EXTRA)}
    tokenizer["model"]["vocab"] = own
    for token in tokenizer["added_tokens"]:
        token["id"] = own[token["content"]]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = tensors[name][torch.tensor(kept)]
        tensors[name] = torch.cat((rows, torch.randn(EXTRA, rows.shape[1])))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    special = {"bos_token_id": own["<s>"], "eos_token_id": own["</s>"]}
    config |= {"vocab_size": len(own), **special}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    return folder


def test_the_same_model_in_other_words_is_always_right(tmp_path: Path) -> None:
    """Red when a token is read as another, or a draw takes the noise of another id."""
    open_tiny(tmp_path, "llama")
    other = turned(tmp_path / "llama", tmp_path / "other", dropped=0)
    config = {"model": str(other), "num_speculative_tokens": 4, "adaptive": False}
    llm = open_tiny(tmp_path, "llama", speculative_config=config)
    kinds = ("greedy", "warm", "top-p", "min-p", "penalties")
    answer(llm, [("the cat", sampling(kind, 3, ignore_eos=True)) for kind in kinds])
    stats = llm.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 60


def test_tokens_that_are_missing_change_nothing(tmp_path: Path) -> None:
    """Red when a token without a counterpart is drafted, or what is drawn depends on it."""
    plain = answer(open_tiny(tmp_path, "llama"), everyone())
    other = turned(tmp_path / "llama", tmp_path / "other", dropped=12)
    config = {"model": str(other), "num_speculative_tokens": 3, "adaptive": False}
    llm = open_tiny(tmp_path, "llama", speculative_config=config)
    assert answer(llm, everyone()) == plain
    stats = llm.stats()
    assert 100 < stats.num_accepted_tokens < stats.num_drafted_tokens


def test_tokens_are_told_by_their_strings(tmp_path: Path) -> None:
    """Red when vocabularies of one size are taken for one, or an end is not the longest."""
    open_tiny(tmp_path, "llama")
    other = turned(tmp_path / "llama", tmp_path / "other", dropped=EXTRA)
    target, own = Tokenizer.from_folder(tmp_path / "llama"), Tokenizer.from_folder(other)
    assert own.largest_id == target.largest_id and are_alike(own, own)
    assert not are_alike(own, target)
    shared = SharedTokens.of(own, (own.largest_id + 1, target.largest_id + 1), target)
    assert len(shared.pairs) == len(own) - EXTRA
    for mine, theirs in shared.pairs:
        assert token_string(own, mine) == token_string(target, theirs)
        assert shared.read_as[theirs] == mine
    longer = SharedTokens.of(target, (len(target), len(own)), own)
    extra = own.token_to_id("extra7")
    assert extra is not None and longer.read_as[extra] == target.token_to_id("7")
