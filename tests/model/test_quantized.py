"""Every way of storing weights quantised: the engine says what it says with the same weights plain.

Writers here follow the definitions of the layouts; `tests/load` has what reference packages wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.tiny import tiny_model
from tests.model.records import records
from tests.model.test_tiny import PROMPT, engine_of

GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
NEAR = 0.1  # between logprobs where inputs are rounded to eight bits
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.linspace(-1.0, 1.0, 16)

Stored = tuple[dict[str, Tensor], Tensor]  # by the ends of their names; what they stand for


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """[rows, codes] -> int32 [rows, words], the first code lowest."""
    parts = codes.long().view(len(codes), -1, 32 // bits)
    total = (parts << bits * torch.arange(32 // bits)).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], zeros and scales [out, groups], and what they stand for."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(-1) / 6.0).half()
    zeros = torch.arange(len(weight))[:, None] % 3 + torch.arange(groups.shape[1]) % 2 + 6
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    codes = codes.clamp(0, 15)
    values = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.view_as(weight), zeros, scales, values.view_as(weight)


def gptq(weight: Tensor) -> Stored:
    codes, zeros, scales, values = rounded(weight)
    packed = {"qweight": words(codes).t(), "qzeros": words(zeros.t() - 1), "scales": scales.t()}
    return packed, values


def gptq_ordered(weight: Tensor) -> Stored:
    """Inputs of a group are far apart, in the same way for all that read the same inputs."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    codes, zeros, scales, values = rounded(weight[:, order])
    places = order.argsort()
    packed = {"qweight": words(codes[:, places]).t(), "qzeros": words(zeros.t() - 1)}
    packed |= {"scales": scales.t(), "g_idx": (places // GROUP).int()}
    return packed, values[:, places]


def awq(weight: Tensor) -> Stored:
    def turned(codes: Tensor) -> Tensor:
        return words(codes.view(len(codes), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    codes, zeros, scales, values = rounded(weight)
    packed = {"qweight": turned(codes.t()), "qzeros": turned(zeros.t()), "scales": scales.t()}
    return packed, values


def pack_quantized(weight: Tensor) -> Stored:
    codes, zeros, scales, values = rounded(weight)
    packed = {"weight_packed": words(codes), "weight_zero_point": words(zeros.t()).t()}
    shape = torch.tensor(weight.shape)
    return {**packed, "weight_scale": scales, "weight_shape": shape}, values


def int_quantized(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.view(len(weight), -1, 16)
    scales = (groups.abs().amax(-1) * 100).to(torch.float8_e4m3fn)
    unit = (scales.float() * 2**-9).unsqueeze(-1)
    near = (groups.abs() / unit).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    values = (E2M1[near] * groups.sign() * unit).view_as(weight)
    codes = (near + 8 * (groups < 0)).view_as(weight)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).byte(), scales, values


def nvfp4_divided(weight: Tensor) -> Stored:
    packed, scales, values = nvfp4(weight)
    whole = torch.tensor([2.0**9])
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}, values


def nvfp4_multiplied(weight: Tensor) -> Stored:
    packed, scales, values = nvfp4(weight)
    whole = torch.tensor(2.0**-9)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}, values


def fp8(weight: Tensor) -> Stored:
    rows, columns = (-(-size // 32) for size in weight.shape)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) + 0.01
    spread = scales.repeat_interleave(32, 0)[: weight.shape[0]]
    spread = spread.repeat_interleave(32, 1)[:, : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * spread


def nf4(weight: Tensor) -> Stored:
    blocks = weight.view(-1, 64)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales[:, None]).unsqueeze(-1).sub(NF4).abs().argmin(-1)
    pairs = codes.view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
    said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    packed = {"weight": (pairs[:, :1] * 16 + pairs[:, 1:]).byte(), "weight.absmax": scales}
    packed |= {"weight.quant_map": NF4, "weight.quant_state.bitsandbytes__nf4": said}
    return packed, (NF4[codes] * scales[:, None]).view_as(weight)


def group(**weights: Any) -> dict[str, Any]:
    groups = {"a": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


FOUR = {"bits": 4, "group_size": GROUP}
WAYS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "gptq": ({"quant_method": "gptq", **FOUR}, gptq),
    "gptq_ordered": ({"quant_method": "gptq", "desc_act": True, **FOUR}, gptq_ordered),
    "awq": ({"quant_method": "awq", **FOUR}, awq),
    "auto-round": ({"quant_method": "auto-round", **FOUR}, gptq),
    "pack": (
        group(num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
        pack_quantized,
    ),
    "int": (group(num_bits=8, strategy="channel"), int_quantized),
    "nvfp4": (
        group(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4_divided,
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_multiplied),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
}


def two_folders(
    tmp_path: Path, family: str, way: str, changes: dict[str, Any] | None = None
) -> tuple[Path, Path]:
    """A tiny model with its weights quantised, and with the same values plain."""
    said, write = WAYS[way]
    stored = tiny_model(family, tmp_path / "stored", seed=1, **SIZES)
    plain = tiny_model(family, tmp_path / "plain", seed=1, **SIZES)
    tensors = {k: v.clone() for k, v in load_file(stored / "model.safetensors").items()}
    values = dict(tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        packed, values[name] = write(tensors.pop(name).float())
        tensors |= {name.removesuffix("weight") + end: t for end, t in packed.items()}
    for folder, kept in ((stored, tensors), (plain, values)):
        made = {name: tensor.contiguous().clone() for name, tensor in kept.items()}
        save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {**said, **(changes or {})}
    (stored / "config.json").write_text(json.dumps(config))
    return stored, plain


@pytest.mark.parametrize("way", WAYS)
def test_the_same_as_plain(way: str, tmp_path: Path) -> None:
    """Red when a weight ends up in the wrong place or form: in fp32 all bits are the same, and in
    the form that is stored, where inputs are rounded too, nearly so."""
    stored, plain = two_folders(tmp_path, "llama", way)
    want = records(engine_of(plain), [PROMPT])
    assert records(engine_of(stored), [PROMPT]) == want
    (near,) = records(engine_of(stored, dtype="auto"), [PROMPT])
    gaps = torch.tensor(near[0].top_logprobs) - torch.tensor(want[0][0].top_logprobs)
    assert gaps.abs().max() < NEAR


@pytest.mark.parametrize("family, way", [("deepseek_v3", "fp8"), ("qwen3_moe", "pack")])
def test_latents_and_experts(family: str, way: str, tmp_path: Path) -> None:
    """Red when a projection of another kind is not found, or rows are permuted without scales."""
    stored, plain = two_folders(tmp_path, family, way)
    assert records(engine_of(stored), [PROMPT]) == records(engine_of(plain), [PROMPT])


def test_inputs_in_eight_bits(tmp_path: Path) -> None:
    """Red when inputs are not rounded where the config says so: then bits would be the same."""
    groups = {"a": {**WAYS["int"][0]["config_groups"]["a"]}}
    groups["a"]["input_activations"] = {"num_bits": 8, "strategy": "token", "dynamic": True}
    stored, plain = two_folders(tmp_path, "llama", "int", {"config_groups": groups})
    (got,), (want,) = records(engine_of(stored), [PROMPT]), records(engine_of(plain), [PROMPT])
    gap = torch.tensor(got[0].top_logprobs) - torch.tensor(want[0].top_logprobs)
    assert 0.0 < gap.abs().max() < NEAR


def test_shapes_are_judged_before_numbers(tmp_path: Path) -> None:
    """Red when weights are read before all shapes are known to fit: the first scales are bad."""
    stored, _ = two_folders(tmp_path, "llama", "gptq")
    tensors = {k: v.clone() for k, v in load_file(stored / "model.safetensors").items()}
    tensors["model.layers.0.self_attn.q_proj.scales"].fill_(torch.nan)
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"0.self_attn.q_proj.scales has nan"):
        engine_of(stored)
    tensors["model.layers.1.mlp.up_proj.scales"] = torch.ones(3, 96)
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.scales has shape \(3, 96\) .* \(2, 96\)"):
        engine_of(stored)
