"""Tiny checkpoints in layouts that only others write, by the layouts' definitions: see `matrix.py`.

Each takes a folder with a plain model and puts its weights into another form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.test_quantized import nf4

BLOCK = 128  # of DeepSeek's eight-bit floats
MX = 32  # weights below one power of two


def fp8_blocks(weight: Tensor) -> dict[str, Tensor]:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    filled = torch.zeros(rows * BLOCK, columns * BLOCK)
    filled[: weight.shape[0], : weight.shape[1]] = weight
    scales = filled.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    codes = weight / spread[: weight.shape[0], : weight.shape[1]]
    return {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def ternary(weight: Tensor) -> dict[str, Tensor]:
    """A quarter of the rows in each pair of bits, 1 more than the number they stand for."""
    scale = weight.abs().mean()
    codes = ((weight / scale).round().clamp(-1, 1) + 1).byte().view(4, -1, weight.shape[1])
    packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
    return {"weight": packed, "weight_scale": scale.reshape(1)}


def each(write: Callable[[Tensor], dict[str, Tensor]], said: dict[str, Any], folder: Path) -> None:
    """All projections, one by one."""
    tensors = _tensors(folder)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        made = write(tensors.pop(name))
        tensors |= {name.removesuffix("weight") + end: tensor for end, tensor in made.items()}
    _save(folder, tensors, said)


def mxfp4_experts(folder: Path) -> None:
    """gpt-oss's: random codes of all experts, outputs as rows, and scales, the smallest too."""
    tensors, random = _tensors(folder), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        num, num_in, num_out = tensors.pop(name).shape
        shape = (num, num_out, num_in // MX)
        codes = torch.randint(0, 256, (*shape, MX // 2), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=random)
        scales[0, 0, 0] = 0
        tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    _save(folder, tensors, {"quant_method": "mxfp4"})


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Copies: what was read may be a view of the file, which is about to be written again."""
    return {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}


def _save(folder: Path, tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
    made = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))


_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_TERNARY = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "offline",
}
STORED: dict[str, Callable[[Path], None]] = {
    "fp8 in blocks of 128": partial(each, fp8_blocks, _BLOCKS),
    "bitsandbytes nf4": partial(
        each, lambda weight: nf4(weight)[0], {"quant_method": "bitsandbytes", "load_in_4bit": True}
    ),
    "bitnet": partial(each, ternary, _TERNARY),
    "gpt-oss's mxfp4": mxfp4_experts,
}
