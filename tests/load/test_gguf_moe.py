"""Mixtures of experts in GGUF files: Hugging Face models written with GGUF's names and layouts.

The files are made by the gguf package, the numbers by transformers; what is generated from a file
must be what the model it was made of generates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.fit import check_fit
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.models.registry import spec_of
from quire.quant.coded import Coded
from tests.hf import StateDictCheckpoint, tiny_model
from tests.load.gguf_file import ATTENTION, assert_generates_as, finish, new_writer

gguf = pytest.importorskip("gguf")

ARCHS = {"mixtral": "llama", "qwen2-moe": "qwen2moe", "qwen3-moe": "qwen3moe"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    **ATTENTION,
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}


def tensors_of(model: Any, arch: str) -> dict[str, Tensor]:
    """The model's weights under GGUF names, in GGUF layouts."""
    config, out = model.config, {}
    for name, tensor in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if stem in OUTER:
            out[f"{OUTER[stem]}.{kind}"] = tensor
            continue
        layer, _, inner = name.removeprefix("model.layers.").partition(".")
        at = f"blk.{layer}."
        if inner == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            out |= {f"{at}ffn_gate_exps.weight": gate, f"{at}ffn_up_exps.weight": up}
        elif inner == "mlp.experts.down_proj":
            out[f"{at}ffn_down_exps.weight"] = tensor
        else:
            stem, _, kind = inner.rpartition(".")
            if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
                is_query = stem.endswith("q_proj")
                heads = config.num_attention_heads if is_query else config.num_key_value_heads
                tensor = interleaved(tensor, heads)
            if stem == "mlp.shared_expert_gate":
                tensor = tensor.squeeze(0)  # as llama.cpp's converter leaves it
            out[f"{at}{INNER[stem]}.{kind}"] = tensor
    return out


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write(
    path: Path, model: Any, arch: str, more: Callable[[Any], None] | None = None, **changes: Tensor
) -> Path:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or 8
    writer = new_writer(path, config, arch, head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(config.num_local_experts if arch == "llama" else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch != "llama":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if more is not None:
        more(writer)
    tensors = {**tensors_of(model, arch), **changes}
    # An empty one in `changes` leaves it out.
    finish(writer, {name: tensor for name, tensor in tensors.items() if tensor.numel()})
    return path


@pytest.mark.parametrize("family", ARCHS)
def test_a_file_generates_what_its_model_does(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    path = write(tmp_path / "tiny.gguf", model, ARCHS[family])
    checkpoint = GGUFCheckpoint.open(path)
    stored = StateDictCheckpoint(model)
    want_tensors = dict(apart(stored))
    assert set(checkpoint.names()) == set(want_tensors)
    for name, tensor in want_tensors.items():
        assert checkpoint.shape(name) == tuple(tensor.shape), name
        assert torch.equal(checkpoint.read(name), tensor), name
    got, want = spec_of(checkpoint.config), spec_of(stored.config)
    assert (got.architecture, got.moe) == (want.architecture, want.moe)
    assert_generates_as(checkpoint, model, count=3)


def apart(stored: StateDictCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Each expert under its own name; transformers holds all of them in one tensor."""
    for name in stored.names():
        at, experts, last = name.partition("mlp.experts.")
        if not experts:
            yield name, stored.read(name)
            continue
        for e, own in enumerate(stored.read(name)):
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for part, rows in zip(parts, own.chunk(len(parts)), strict=True):
                yield f"{at}{experts}{e}.{part}.weight", rows


def test_quantised_experts(tmp_path: Path) -> None:
    """Stacked tensors in blocks: each row of each expert by itself."""
    model = tiny_model("qwen3-moe")
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((8, 48, 32), dtype=np.float32)  # down: 48 outputs of 32 inputs
    packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)

    def more(writer: Any) -> None:
        writer.add_tensor(
            "blk.1.ffn_down_exps.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0
        )

    lost = {"blk.1.ffn_down_exps.weight": torch.empty(0)}
    path = write(tmp_path / "tiny.gguf", model, "qwen3moe", more, **lost)
    want = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    checkpoint = GGUFCheckpoint.open(path)
    for e in range(8):
        name = f"model.layers.1.mlp.experts.{e}.down_proj.weight"
        stays = checkpoint.packed(name)
        assert stays is not None and isinstance(stays, Coded)
        assert np.array_equal(checkpoint.read(name).numpy(), want[e])
        assert np.array_equal(stays.dequantize().numpy(), want[e])


def test_early_files_state_no_widths(tmp_path: Path) -> None:
    """Red when the widths of experts are not found in the tensors."""
    model = tiny_model("qwen2-moe")
    path = write(tmp_path / "tiny.gguf", model, "qwen2moe")
    content = path.read_bytes()
    for key in (b"expert_feed_forward_length", b"expert_shared_feed_forward_length"):
        assert content.count(key) == 1
        content = content.replace(key, b"x" * len(key))
    path.write_bytes(content)
    moe = spec_of(GGUFCheckpoint.open(path).config).moe
    assert moe is not None and (moe.ffn_size, moe.shared_ffn_size) == (32, 56)


WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "lost": ({"blk.2.ffn_up_exps.weight": torch.empty(0)}, r"blk\.2\.ffn_up_exps"),
    "flat": ({"blk.0.ffn_down_exps.weight": torch.ones(8, 48)}, "want 8 experts"),
    "too few": ({"blk.0.ffn_down_exps.weight": torch.ones(7, 48, 32)}, "want 8 experts"),
    "unlike": ({"blk.1.ffn_up_exps.weight": torch.ones(8, 16, 48)}, "the config asks for"),
    "shared": ({"blk.0.ffn_up_shexp.weight": torch.ones(32, 48)}, r"blk\.0\.ffn_up_shexp"),
}


@pytest.mark.parametrize("name", WRONG)
def test_experts_unlike_the_metadata(tmp_path: Path, name: str) -> None:
    changes, says = WRONG[name]
    path = write(tmp_path / "tiny.gguf", tiny_model("qwen3-moe"), "qwen3moe", **changes)
    with pytest.raises(CheckpointError, match=says):
        checkpoint = GGUFCheckpoint.open(path)
        check_fit(checkpoint, spec_of(checkpoint.config))


@pytest.mark.parametrize(
    "more,says",
    [
        (lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "only softmax"),
        (lambda w: w.add_expert_weights_scale(2.5), "expert_weights_scale.*only 1"),
    ],
    ids=["gating", "scale"],
)
def test_other_routers_are_refused(tmp_path: Path, more: Any, says: str) -> None:
    path = write(tmp_path / "tiny.gguf", tiny_model("mixtral"), "llama", more)
    with pytest.raises(CheckpointError, match=says):
        GGUFCheckpoint.open(path)
