"""BitNet against transformers: plain, packed in two conventions, and rounded when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations import bitnet as oracle

from quire.errors import CheckpointError, NotSupported
from quire.load.ternary import TernaryForm, round_weight, unpack
from quire.models.registry import spec_of
from quire.models.tiny import tiny_model
from quire.models.tiny_configs import tiny_config
from quire.native.library import find_library
from quire.ops.int8_inputs import round_rows
from quire.ops.native_ops import NativeOps
from tests.hf import greedy
from tests.model.records import records
from tests.model.test_parity import make, prompts, run
from tests.model.test_tiny import PROMPT, engine_of

FORMS = [("autobitlinear", "offline"), ("bitlinear", "offline"), ("autobitlinear", "online")]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """transformers compiles its helpers; as plain code they are the same and start at once."""
    with torch.compiler.set_stance("force_eager"):
        yield


def ternary_folder(folder: Path, kind: str, mode: str, **changes: Any) -> Path:
    """A tiny BitNet as its makers store it."""
    tiny_model("bitnet", folder, seed=1, num_hidden_layers=3, **changes)
    said = {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": mode}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    tensors = read_tensors(folder)
    if mode == "offline":
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            packed, scale = quantized(tensors[name])
            tensors[name] = packed
            tensors[f"{name}_scale"] = 1 / scale if kind == "bitlinear" else scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Copies: what was read may be a view of the file, which is about to be written again."""
    return {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().mean()
    return oracle.pack_weights((weight / scale).round().clamp(-1, 1)), scale.reshape(1)


@torch.no_grad()
def expected(folder: Path, prompt: list[int]) -> Tensor:
    model = transformers.BitNetForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer, (oracle.BitLinear, oracle.AutoBitLinear)), "the oracle is not ternary"
    logits: Tensor = model(torch.tensor([prompt])).logits[0, -1]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("kind, mode", FORMS)
def test_ternary_checkpoints(kind: str, mode: str, tmp_path: Path) -> None:
    """Red when a weight is unpacked in another order, scaled the wrong way round, or activations
    are not rounded. A sum that lands on the edge of a step of the rounding may fall either way,
    so a few numbers may be one step off: hence the tolerance."""
    folder = ternary_folder(tmp_path, kind, mode)
    want = expected(folder, PROMPT)
    ((record, *_),) = records(engine_of(folder), [PROMPT])
    got = torch.tensor(record.top_logprobs)
    assert (got - want[torch.tensor(record.top_tokens)]).abs().max() < 5e-3


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_step_is_one_call(dtype: str, tmp_path: Path) -> None:
    """Packed, and expanded with rounded inputs. Red when a layer of BitNet is not recorded, or a
    tape's rounding is not that of a step layer by layer."""
    folder = ternary_folder(tmp_path, *FORMS[0], head_dim=16, intermediate_size=64)
    taped = engine_of(folder, dtype=dtype)
    if find_library().library is None:
        pytest.skip("no native library")
    assert taped.runner.tapes is not None
    plain = engine_of(folder, dtype=dtype, enforce_eager=True)
    assert plain.runner.tapes is None
    some = prompts(3, seed=4)
    assert records(taped, some) == records(plain, some)
    want = expected(folder, PROMPT)
    ((record, *_),) = records(taped, [PROMPT], first=9)
    got = torch.tensor(record.top_logprobs)
    assert (got - want[torch.tensor(record.top_tokens)]).abs().max() < 5e-2


@pytest.mark.parametrize("kind, mode", FORMS[:1])
def test_bits_do_not_depend_on_the_company(kind: str, mode: str, tmp_path: Path) -> None:
    """Red when a row's rounding reads other rows."""
    folder, some = ternary_folder(tmp_path, kind, mode), prompts(5, seed=4)
    lone = engine_of(folder, max_num_seqs=1, enable_prefix_caching=False)
    alone = [records(lone, [prompt], first=i)[0] for i, prompt in enumerate(some)]
    assert records(engine_of(folder, max_num_batched_tokens=11), some) == alone


def test_plain_weights_in_a_mixed_batch(tmp_path: Path) -> None:
    """Chunks and decodes in the same steps, more requests than rows; nothing is rounded."""
    folder = tiny_model("bitnet", tmp_path, seed=7)
    model = transformers.BitNetForCausalLM.from_pretrained(folder).eval()
    engine = engine_of(folder, max_num_batched_tokens=24, max_num_seqs=4)
    some = prompts(7, seed=1)
    requests = [make(i, prompt, 12) for i, prompt in enumerate(some)]
    run(engine, requests)
    for request, prompt in zip(requests, some, strict=True):
        assert request.output == greedy(model, prompt, 12)


def test_rounding_is_that_of_the_training() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 40) * 3, torch.randn(16, 40)
    x[2] = 0.0
    assert torch.equal(round_rows(x), oracle.ActQuant.apply(x))
    if library := find_library().library:
        wide = torch.randn(7, 48) * 3
        assert torch.equal(NativeOps(library).round_rows(wide), oracle.ActQuant.apply(wide))
    assert torch.equal(round_rows(x.bfloat16()), oracle.ActQuant.apply(x.bfloat16()))
    assert torch.equal(round_weight(weight), oracle.WeightQuant.apply(weight))


def test_unpacking() -> None:
    """Red when bytes are read in another order than they were written."""
    torch.manual_seed(0)
    ternary = torch.randint(-1, 2, (12, 5)).float()
    assert torch.equal(unpack(oracle.pack_weights(ternary.clone())), ternary)
    with pytest.raises(CheckpointError, match="has 3 among its values"):
        unpack(torch.tensor([[0b11]], dtype=torch.uint8))


@pytest.mark.parametrize(
    "said, words",
    [
        ({"use_rms_norm": True}, "got use_rms_norm=true"),
        ({"modules_to_not_convert": ["lm_head", "up_proj"]}, r"want a list of lm_head"),
        ({"linear_class": "trilinear"}, "got linear_class='trilinear'"),
    ],
)
def test_unknown_variants_are_refused(said: dict[str, Any], words: str) -> None:
    config = {"quantization_config": {"quant_method": "bitnet", **said}}
    with pytest.raises(NotSupported, match=words):
        TernaryForm.of(config)
    assert TernaryForm.of({"quantization_config": {"quant_method": "gptq"}}) is None
    assert TernaryForm.of({}) is None


def test_a_scale_must_be_a_number(tmp_path: Path) -> None:
    folder = ternary_folder(tmp_path, "autobitlinear", "offline")
    tensors = read_tensors(folder)
    tensors["model.layers.0.mlp.up_proj.weight_scale"].zero_()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale is \[0.0\], want one number"):
        engine_of(folder)


def test_what_its_configs_leave_out() -> None:
    """Red when a default differs from that of transformers."""
    config = tiny_config("bitnet")
    for key in ("rope_theta", "rms_norm_eps", "hidden_act"):
        del config[key]
    spec, theirs = spec_of(config), transformers.BitNetConfig()
    assert spec.rope is not None and spec.rope.theta == theirs.rope_parameters["rope_theta"]
    assert spec.norm_eps == theirs.rms_norm_eps and spec.activation == theirs.hidden_act
