"""The decoder that is trained is the family's own: its values and gradients are transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from quire.compress.source import Source
from quire.distill.decoder import TrainableDecoder, streams
from quire.distill.losses import divergence, survival
from quire.errors import NotSupported
from quire.models.heads.eagle3 import Eagle3Head
from quire.models.tiny import tiny_model
from tests.distill.case import CPU

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "olmo2", "granite"]


def trainable(folder: Path) -> TrainableDecoder:
    source = Source.open(str(folder))
    tensors = {name: source.read(name) for name in source.places}
    return TrainableDecoder.of(source.spec, source.names, tensors, CPU)


def some_ids(vocab: int) -> Tensor:
    return torch.randint(2, vocab, (2, 21), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gradients_and_names(family: str, tmp_path: Path) -> None:
    """Red when a family's wiring, window, norm offset or rotation is trained other than it runs, or
    a weight is written back under another name or in another place."""
    folder = tiny_model(family, tmp_path / "model")
    own = trainable(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = some_ids(own.model.spec.vocab_size)
    wanted = theirs(ids).logits
    logits = own.model.logits(streams(own.model, ids).final.flatten(0, 1))
    torch.testing.assert_close(logits, wanted.flatten(0, 1), rtol=1e-3, atol=2e-4)

    goal = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    divergence(logits, goal).backward()
    divergence(wanted.flatten(0, 1), goal).backward()
    gradients = dict(theirs.named_parameters())
    for name, place in own.leaves.places.items():
        leaf = own.leaves.tensors[place.name].grad
        assert leaf is not None
        part = leaf if place.part is None else leaf[place.part]
        part = part.t() if place.transposed else part
        torch.testing.assert_close(part, gradients[name].grad, rtol=2e-2, atol=2e-4, msg=name)

    source = Source.open(str(folder))
    stored = own.leaves.stored(torch.float32)
    assert stored.keys() == source.places.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor, source.read(name), rtol=0, atol=1e-6)


def test_padding_behind_changes_nothing(tmp_path: Path) -> None:
    """Red when a sequence's states depend on the length of its batch."""
    own = trainable(tiny_model("llama", tmp_path / "model"))
    ids = some_ids(own.model.spec.vocab_size)
    padded = torch.cat((ids, torch.zeros_like(ids)), 1)
    alone = streams(own.model, ids, (1, 2))
    beside = streams(own.model, padded, (1, 2))
    torch.testing.assert_close(beside.final[:, :21], alone.final)
    torch.testing.assert_close(beside.taps[:, :21], alone.taps)
    assert alone.taps.shape == (2, 21, 2, own.model.spec.hidden_size)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "bitnet"])
def test_families_that_are_not_trained(family: str, tmp_path: Path) -> None:
    """Red when layers without a backward pass are trained on in silence."""
    with pytest.raises(NotSupported, match=r"not trained here|no backward pass|rounds its weights"):
        trainable(tiny_model(family, tmp_path / "model"))


def test_survival_is_counted_by_hand() -> None:
    """Red when a draft counts though one before it was wrong, or it lies outside the answer."""
    generator = torch.Generator().manual_seed(0)
    agrees = torch.rand(3, 17, generator=generator) < 0.7
    counts = torch.zeros(3, 17, dtype=torch.bool)
    counts[0, 4:], counts[1, :9], counts[2] = True, True, True
    found = [0] * 4
    for seq in range(3):
        for start in range(17):
            for depth in range(4):
                places = range(start, start + depth + 1)
                found[depth] += all(p < 17 and agrees[seq, p] and counts[seq, p] for p in places)
    assert survival(agrees, counts, 4).tolist() == found


def eagle_chain(head: Eagle3Head, ids: Tensor, features: Tensor, start: int, depth: int) -> Tensor:
    """The guess at one position, rolled on one at a time with plain causal attention."""
    from quire.distill.attention import NO_CACHE, GraphAttention, GraphPlan
    from quire.forward import LayerContext

    known, logits = features[: start + 1], torch.empty(0)
    for roll in range(depth):
        tokens = ids[1 : start + 2 + roll]
        at = LayerContext(GraphAttention(), NO_CACHE, GraphPlan.of(tokens[None]))
        guessed = head.attend(head.store(tokens, known, at), at)
        logits = guessed.logits[-1]
        known = torch.cat((known, guessed.features[-1:]))
    return logits


def test_rolled_chains_are_those_of_drafting(tmp_path: Path) -> None:
    """Red when a roll sees another chain's guesses, misses its own, or rotates by other positions
    than a head that drafts one token after the other."""
    from quire.distill.answers import Answer
    from quire.distill.attention import NO_CACHE
    from quire.distill.pupils.eagle3 import ahead, make
    from quire.distill.recipe import Schedule
    from quire.distill.rolled import RolledAttention, RolledPlan
    from quire.distill.teacher import Target
    from quire.forward import LayerContext
    from tests.distill.case import SHAPES, target

    made = make(
        Target.open(str(target(tmp_path)), CPU), SHAPES["eagle3"], Schedule(), [Answer([1], [2])]
    )
    head, generator = made.head, torch.Generator().manual_seed(3)
    with torch.no_grad():
        for leaf in made.leaves().values():
            leaf += 0.2 * torch.randn(leaf.shape, generator=generator)
    ids = some_ids(head.spec.layer.vocab_size)
    states = torch.randn(42, 3 * head.spec.state_size, generator=generator)
    first = features = head.features(states)
    plan = RolledPlan.of(ids)
    at = LayerContext(RolledAttention(), NO_CACHE, plan)
    for roll in range(3):
        guessed = head.attend(head.store(ahead(ids, roll + 1).flatten(), features, at), at)
        features, plan.positions = guessed.features, plan.positions + 1
        for start in (0, 5, 16):
            want = eagle_chain(head, ids[1], first[21:], start, roll + 1)
            torch.testing.assert_close(guessed.logits[21 + start], want, rtol=1e-4, atol=1e-4)
