"""Scales that are folded leave what a block computes as it was, in every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.compress.folds import folds_of
from quire.compress.source import Source
from quire.models.tiny import tiny_model
from quire.models.tiny_configs import tiny_families
from tests.compress.models import CPU, hidden
from tests.load.held import Held

# Blocks of these have neither a norm nor a product before some of their products.
FEWER = {"Olmo2ForCausalLM", "BitNetForCausalLM", "GptOssForCausalLM"}


@pytest.mark.parametrize("family", tiny_families())
def test_nothing_is_changed(family: str, tmp_path: Path) -> None:
    """Red when a fold misses a bias, a norm's offset, a fused row or an expert."""
    model = tiny_model(family, tmp_path / "model")
    source = Source.open(str(model))
    if any(place.target.transposed for place in source.places.values()):
        pytest.skip("stored transposed: quantised as GGUF alone")
    tensors, num_folds = {}, 0
    generator = torch.Generator().manual_seed(1)
    for layer in range(source.spec.num_layers):
        block = source.block(layer, frozenset(), CPU)
        for fold in folds_of(source.spec, block):
            num_in = block.tensors[block.at(fold.sites[0])[0].name].shape[1]
            scale = fold.shared(torch.rand(num_in, generator=generator) + 0.5)
            fold.apply(scale, block, {}, source.spec.norm_offset)
            num_folds += 1
        tensors |= block.tensors
    want, got = hidden(model), hidden(model, Held(source.config, tensors))
    assert num_folds >= (1 if family in FEWER else 4)
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-3 * want.abs().max().item())
