"""AutoRound: what the package wrote comes out as it reads it, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.errors import CheckpointError, NotSupported
from quire.native.panels import can_be_panels
from tests.load.held import plain, vectors

CASES = vectors("auto-round")


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_package(case: str) -> None:
    """Red when the zeros of one layout are read as those of the other, or a CPU expands codes of
    some bits. Products are of fp16."""
    vector = CASES[case]
    stored = plain(vector.said, vector.tensors)
    assert list(stored.names()) == ["w.weight"]
    assert torch.equal(stored.read("w.weight").half(), vector.want)
    packed = stored.packed("w.weight")
    assert packed is not None and can_be_panels(packed)


def test_the_layout_of_awq() -> None:
    other = vectors("awq")["g32"]
    said = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
    said["packing_format"] = "auto_round:auto_awq"
    assert torch.equal(plain(said, other.tensors).read("w.weight").half(), other.want)


@pytest.mark.parametrize("key", ["w", ".*w$"])
def test_layers_have_numbers_of_their_own(key: str) -> None:
    """Red when a name is not found, or is taken for a pattern that other layers match."""
    vector = CASES["asym4"]
    extra = {key: {"bits": 4, "group_size": 32}, "model": {"bits": 2}}
    said = {**vector.said, "bits": 8, "extra_config": extra}
    assert torch.equal(plain(said, vector.tensors).read("w.weight").half(), vector.want)


@pytest.mark.parametrize(
    "said, words",
    [
        ({"packing_format": "auto_round:fake"}, "got packing_format='auto_round:fake'"),
        ({"data_type": "mx_fp"}, "got data_type='mx_fp' of auto-round, want int"),
        ({"extra_config": {"a": 4}}, "got 4 under 'a' of extra_config, want an object"),
        ({"extra_config": {"(": {}}}, "want a regular expression"),
        ({"bits": 16}, "got bits=16, of which only 2, 3, 4, 5, 6, 7, 8 are read"),
    ],
)
def test_unknown_variants_are_refused(said: dict[str, Any], words: str) -> None:
    vector = CASES["asym4"]
    with pytest.raises((NotSupported, CheckpointError), match=words):
        plain({**vector.said, **said}, vector.tensors)
