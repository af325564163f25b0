"""gpt-oss against transformers: logits, greedy tokens, and both ways its experts are stored.

The tiny models have biases and sinks that matter and experts whose gates reach the clamp: with
transformers' own small initial values all of these could be left out unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.config import EngineArgs
from quire.engine.build import Engine, build_engine
from quire.errors import CheckpointError
from quire.load.safetensors_checkpoint import SafetensorsCheckpoint
from quire.models.registry import spec_of
from tests.hf import VOCAB, StateDictCheckpoint, greedy, tiny_engine
from tests.model.records import records
from tests.model.test_parity import TOLERANCE, make, prompts, run

HIDDEN, FFN, EXPERTS = 64, 96, 6
WINDOW = 13  # neither a multiple of a page nor of a chunk
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def tiny_gpt_oss(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 256,
            "sliding_window": WINDOW,
            "rope_parameters": YARN,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **changes,
        }
    )
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
            elif "bias" in name:
                parameter.normal_(0, 0.5)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:  # wide enough that gates and ups pass the limit of 7 now and then
                parameter.normal_(0, 0.4 if "gate_up" in name else 0.15)
    return model


@torch.no_grad()
def plain_attention() -> Any:
    """All layers see everything, and the sinks take nothing."""
    model = tiny_gpt_oss(layer_types=["full_attention"] * 4)
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e9)
    return model


def prompt_errors(engine: Engine, model: Any, prompt: list[int]) -> list[float]:
    """How far each prompt token's logprob is from transformers'."""
    want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    request = make(1, prompt, 1)
    request.params = request.params.with_(prompt_logprobs=5)
    engine.core.add(request)
    errors = []
    while engine.core.has_work:
        for event in engine.core.step():
            for at, record in enumerate(event.prompt_logprobs, event.prompt_start):
                tops = want[at][torch.tensor(record.top_tokens)]
                errors.append((torch.tensor(record.top_logprobs) - tops).abs().max().item())
    return errors


# ------------------------------------------------------------ the model


@torch.no_grad()
def test_logits_equal_transformers() -> None:
    model = tiny_gpt_oss()
    prompt = prompts(1, seed=3)[0] + [5, 6, 7, 8, 9] * 8
    errors = prompt_errors(tiny_engine(model, max_num_batched_tokens=16), model, prompt)
    assert len(errors) == len(prompt) - 1 and max(errors) < TOLERANCE


@torch.no_grad()
def test_greedy_tokens_in_a_mixed_batch() -> None:
    """Prefill chunks and decodes in the same steps, shared prefixes, more requests than rows."""
    model = tiny_gpt_oss()
    engine = tiny_engine(model, max_num_batched_tokens=24, max_num_seqs=4)
    some = prompts(5, seed=1)
    some += [some[0] + some[1][:9], some[0] + some[2][:5]]
    requests = [make(i, p, 12) for i, p in enumerate(some)]
    run(engine, requests)
    for request, prompt in zip(requests, some, strict=True):
        assert request.output == greedy(model, prompt, 12)


@torch.no_grad()
def test_experts_alone_equal_transformers() -> None:
    """Without windows and with sinks that take nothing: routers, biases and the clamped gate."""
    model = plain_attention()
    largest: list[float] = []

    def look(experts: Any, inputs: Any) -> None:
        gate_up = torch.einsum("th,eho->teo", inputs[0], experts.gate_up_proj)
        largest.append((gate_up + experts.gate_up_proj_bias).abs().max().item())

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(look)
    prompt = prompts(1, seed=3)[0] + [5, 6, 7, 8, 9] * 8
    errors = prompt_errors(tiny_engine(model, max_num_batched_tokens=16), model, prompt)
    assert len(largest) == 4 and min(largest) > 7.0, "the clamp was not tested"
    assert max(errors) < TOLERANCE


@torch.no_grad()
def test_bits_do_not_depend_on_the_batch() -> None:
    model = tiny_gpt_oss()
    some = prompts(6, seed=5)
    together = records(tiny_engine(model, max_num_batched_tokens=48), some)
    lone = tiny_engine(model, max_num_seqs=1)
    assert [records(lone, [prompt])[0] for prompt in some] == together
    chunked = tiny_engine(model, max_num_batched_tokens=16, max_num_seqs=3)
    assert records(chunked, some) == together


@torch.no_grad()
@pytest.mark.parametrize("chosen", [[3, 1], [5, 0]])
def test_all_tokens_to_the_same_experts(chosen: list[int]) -> None:
    """Red when an expert without tokens, or one with all of them, is handled wrong."""
    model = plain_attention()
    for layer in model.model.layers:
        layer.mlp.router.weight.zero_()
        layer.mlp.router.bias.fill_(-5.0)
        for rank, expert in enumerate(chosen):
            layer.mlp.router.bias[expert] = 2.0 - rank
    engine = tiny_engine(model, max_num_batched_tokens=24)
    engine.runner.min_dropped = 1
    loads = engine.runner.model.count_expert_loads()
    some = prompts(3, seed=2)
    requests = [make(i, p, 4) for i, p in enumerate(some)]
    run(engine, requests)
    for request, prompt in zip(requests, some, strict=True):
        assert request.output == greedy(model, prompt, 4)
    num_fed = sum(map(len, some)) + 3 * 3  # the last token of each is drawn, never fed
    num_drawn = 3 * 4  # rows that reach the experts of the last layer
    for layer, counts in enumerate(loads.tolist()):
        each = num_drawn if layer == 3 else num_fed
        assert counts == [each if expert in chosen else 0 for expert in range(EXPERTS)]


# ------------------------------------------------------------ its config


def test_published_config() -> None:
    """As in the files of the 20b model, in the spelling of that time."""
    kinds = ["sliding_attention", "full_attention"] * 12
    scaling = {k: v for k, v in YARN.items() if k != "rope_theta"}
    scaling |= {"factor": 32.0, "original_max_position_embeddings": 4096}
    spec = spec_of(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "eos_token_id": 200002,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": kinds,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4"},
            "rms_norm_eps": 1e-05,
            "rope_scaling": scaling,
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        }
    )
    assert spec.windows == (128, None) * 12 and spec.sinks
    assert spec.qkv_bias and spec.out_bias and spec.moe is not None and spec.rope is not None
    assert (spec.moe.swiglu_limit, spec.moe.swiglu_alpha) == (7.0, 1.702)
    assert (spec.rope.kind, spec.rope.theta, spec.rope.truncate) == ("yarn", 150_000.0, False)
    # Its makers say 20.91 billion, 3.61 of them active; a lookup in the embedding is not counted.
    assert f"{spec.num_params / 1e9:.2f}" == "20.91"
    assert f"{(spec.num_active_params - spec.vocab_size * spec.hidden_size) / 1e9:.2f}" == "3.61"


def test_what_a_config_leaves_out_is_transformers_default() -> None:
    full = transformers.GptOssConfig(num_hidden_layers=6).to_dict()
    full["architectures"] = ["GptOssForCausalLM"]
    kept = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    kept += ("num_attention_heads", "num_key_value_heads", "num_local_experts", "dtype")
    kept += ("max_position_embeddings",)
    assert spec_of({key: full[key] for key in kept if key in full}) == spec_of(full)


@pytest.mark.parametrize("kinds", [["full_attention"] * 3, ["full_attention", "linear"] * 2, 7])
def test_unknown_layer_kinds_are_refused(kinds: Any) -> None:
    config = {**tiny_gpt_oss().config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    with pytest.raises(CheckpointError, match=r"layer_types=.*want 4 of 'sliding_attention' or"):
        spec_of({**config, "layer_types": kinds})


# ------------------------------------------------------------ its files


def packed(num_rows: int, num_inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random MXFP4 of all experts: blocks, and scales that leave weights around 0.3."""
    generator = torch.Generator().manual_seed(seed)
    groups = num_inputs // 32
    shape = (EXPERTS, num_rows, groups)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)


def write_packed(folder: Path, model: Any, lost: str = "") -> Path:
    """The model as published: experts in MXFP4, which the model itself is given dequantised."""
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        for name, rows, inputs in (("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN)):
            blocks, scales = packed(rows, inputs, seed=i)
            at = f"model.layers.{i}.mlp.experts.{name}"
            tensors |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
            weight = convert_moe_packed_tensors(blocks, scales).float()
            getattr(layer.mlp.experts, name).copy_(weight)
    taken = {name.rsplit("_", 1)[0] for name in tensors}
    tensors |= {n: t.contiguous() for n, t in model.state_dict().items() if n not in taken}
    tensors.pop(lost, None)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    config["architectures"] = ["GptOssForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_engine(folder: Path) -> Engine:
    args = EngineArgs(
        device="cpu", dtype="float32", page_size=4, kv_cache_memory=1 << 22, max_model_len=256
    )
    return build_engine(args, SafetensorsCheckpoint.open(folder))


@torch.no_grad()
def test_packed_experts_equal_transformers(tmp_path: Path) -> None:
    model = plain_attention()
    engine = open_engine(write_packed(tmp_path, model))
    assert max(prompt_errors(engine, model, prompts(1, seed=9)[0] + [7] * 20)) < TOLERANCE


@torch.no_grad()
def test_lost_and_misshapen_experts_are_named(tmp_path: Path) -> None:
    model, at = tiny_gpt_oss(), "model.layers.1.mlp.experts."
    with pytest.raises(CheckpointError, match=rf"{at}down_proj_scales"):
        open_engine(write_packed(tmp_path, model, lost=at + "down_proj_scales"))
    with pytest.raises(CheckpointError, match=rf"tensors are missing.*{at}0.down_proj.weight"):
        open_engine(write_packed(tmp_path, model, lost=at + "down_proj_blocks"))

    def broken(name: str, shape: tuple[int, ...]) -> None:
        checkpoint = StateDictCheckpoint(tiny_gpt_oss())
        checkpoint.tensors[at + name] = torch.zeros(shape)
        build_engine(EngineArgs(device="cpu", dtype="float32"), checkpoint)

    with pytest.raises(CheckpointError, match=rf"{at}gate_up_proj has shape \(6, 64\), want 3"):
        broken("gate_up_proj", (EXPERTS, HIDDEN))
    with pytest.raises(CheckpointError, match=rf"{at}0.down_proj.weight has shape \(64, 50\)"):
        broken("down_proj", (EXPERTS, 50, HIDDEN))
