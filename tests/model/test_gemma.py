"""Gemma and windowed models beyond the common table: bits, spellings of configs, checkpoints that
also see images, and roundings in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3RMSNorm,
    Gemma3TextScaledWordEmbedding,
)

from quire.attn.backend import AttnSpec, HeadTransform
from quire.attn.heads import Rotation, split_heads
from quire.config import EngineArgs
from quire.engine.build import build_engine
from quire.errors import CheckpointError
from quire.models.decoder import Decoder
from quire.models.registry import spec_of
from quire.nn.norm import RMSNorm
from quire.ops.torch_ops import TorchOps
from tests.hf import StateDictCheckpoint, _gemma3_config, tiny_engine, tiny_model
from tests.model.records import records
from tests.model.test_parity import TOLERANCE, prompts

WINDOWED = ["gemma2", "gemma3", "mistral-window", "qwen2-window"]
CPU = torch.device("cpu")


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise is MKL's")
@pytest.mark.parametrize("family", ["gemma", *WINDOWED])
def test_bits_do_not_depend_on_the_company(family: str) -> None:
    model, some = tiny_model(family), prompts(5, seed=4)
    lone = tiny_engine(model, max_num_seqs=1, enable_prefix_caching=False)
    alone = [records(lone, [prompt], first=i)[0] for i, prompt in enumerate(some)]
    for changes in ({"max_num_batched_tokens": 1024}, {"max_chunk": 3}):
        assert records(tiny_engine(model, **changes), some) == alone, changes


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_window_hides_what_lies_behind_it(family: str, backend: str) -> None:
    """Beyond the reach of all layers together a token changes nothing; within it, it does."""
    model = tiny_model(family)
    spec = spec_of(StateDictCheckpoint(model).config)
    (prompt,) = prompts(1, seed=6, longest=1)
    prompt = prompt * 90
    other = [prompt[0] + 1, *prompt[1:]]
    engine = tiny_engine(model, enable_prefix_caching=False, attention_backend=backend)
    same = records(engine, [prompt])[0] == records(engine, [other], first=1)[0]
    assert same == (None not in spec.windows)  # full layers, where there are any, reach it


# ------------------------------------------------------------ configs


def config_of(family: str) -> dict[str, Any]:
    return dict(StateDictCheckpoint(tiny_model(family)).config)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_gemma3_in_its_older_spelling() -> None:
    """As released: a pattern instead of types, two bases of which the first alone is scaled."""
    config = config_of("gemma3")
    older = without(config, "rope_parameters", "layer_types") | {
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert spec_of(older) == spec_of(config)
    spec = spec_of(config)
    assert spec.windows == (13, 13, None, 13, 13, None, 13)
    assert spec.rope is not None and spec.local_rope is not None
    assert (spec.rope.kind, spec.rope.theta, spec.rope.factor) == ("linear", 1e6, 8.0)
    assert (spec.local_rope.kind, spec.local_rope.theta) == ("default", 1e4)


def test_gemma3_as_released_leaves_much_unsaid() -> None:
    """The text part of the 4B model's config, which names what differs from the defaults."""
    said = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = spec_of(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": said,
        }
    )
    want = transformers.Gemma3TextConfig(**without(said, "model_type"))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.max_positions) == (want.vocab_size, want.max_position_embeddings)
    assert [w is None for w in spec.windows] == [t == "full_attention" for t in want.layer_types]
    assert spec.rope is not None and spec.local_rope is not None
    for rope, kind in ((spec.rope, "full_attention"), (spec.local_rope, "sliding_attention")):
        theirs = want.rope_parameters[kind]
        assert (rope.kind, rope.theta) == (theirs["rope_type"], theirs["rope_theta"])
    assert spec.attn_scale == 256**-0.5 and spec.dtype == "bfloat16" and spec.tied
    assert (spec.bos_id, spec.eos_ids) == (2, (1, 106))


def test_gemma2_caps_may_be_left_out_or_turned_off() -> None:
    config = config_of("gemma2")
    silent = without(config, "attn_logit_softcapping", "final_logit_softcapping", "layer_types")
    spec = spec_of(silent)
    assert (spec.attn_softcap, spec.logit_softcap) == (50.0, 30.0)
    assert spec.windows == (13, None, 13, None)
    off = spec_of(config | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (off.attn_softcap, off.logit_softcap) == (None, None)


def test_window_rules_of_other_families() -> None:
    assert spec_of(config_of("mistral-window")).windows == (11, 11, 11)
    assert spec_of(config_of("mistral")).windows == ()
    assert spec_of(config_of("phi3-window")).windows == (17, 17, 17)
    qwen = config_of("qwen2-window")
    assert spec_of(qwen).windows == spec_of(without(qwen, "layer_types")).windows == (None, 9, 9)
    assert spec_of(qwen | {"use_sliding_window": False}).windows == ()
    assert spec_of(without(qwen, "layer_types") | {"max_window_layers": 3}).windows == ()


@pytest.mark.parametrize("types", [["sliding_attention"], ["full_attention"] * 6 + ["linear"], "x"])
def test_wrong_layer_types_are_refused(types: Any) -> None:
    with pytest.raises(CheckpointError, match=r"got layer_types=.*want 7 of"):
        spec_of(config_of("gemma3") | {"layer_types": types})


def test_what_gemma_cannot_be_is_refused() -> None:
    with pytest.raises(CheckpointError, match="got hidden_activation='silu'"):
        spec_of(config_of("gemma2") | {"hidden_activation": "silu"})
    with pytest.raises(CheckpointError, match="use_bidirectional_attention"):
        spec_of(config_of("gemma3") | {"use_bidirectional_attention": True})
    with pytest.raises(CheckpointError, match="got text_config="):
        spec_of(config_of("gemma3") | {"text_config": 3})


# ------------------------------------------------------------ beside images


@pytest.mark.parametrize("is_released", [False, True])
def test_the_language_model_of_one_that_sees(is_released: bool) -> None:
    """Red when the names of either spelling are not found, or a vision tensor is asked for."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=_gemma3_config().to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.normal_(0, 0.2)
    checkpoint = StateDictCheckpoint(model)
    if is_released:
        checkpoint.tensors = {
            name.replace("model.language_model.", "language_model.model."): tensor
            for name, tensor in checkpoint.tensors.items()
        }
    words: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 22}
    engine = build_engine(EngineArgs(**words, max_model_len=64), checkpoint)
    prompt = [5, 9, 17, 40, 3, 60]
    want = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    ((record, *_),) = records(engine, [prompt])
    got = torch.tensor(record.top_logprobs)
    assert (got - want[torch.tensor(record.top_tokens)]).abs().max() < TOLERANCE


# ------------------------------------------------------------ half precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_round_as_gemmas_own(dtype: torch.dtype) -> None:
    """Bit for bit in half precision, where rounding twice or adding one in it would show."""
    torch.manual_seed(0)
    theirs, ours = Gemma3RMSNorm(64, eps=1e-6).to(dtype), RMSNorm(64, 1e-6, dtype, CPU, offset=1.0)
    x, residual = torch.randn(2, 50, 64).to(dtype)
    with torch.no_grad():
        theirs.weight.normal_(0, 0.3)
        ours.weight.copy_(theirs.weight)
        want = theirs(x + residual)
    ours.finish(TorchOps())
    got, summed = ours(x, residual)
    assert torch.equal(summed, x + residual)
    compare = torch.testing.assert_close if dtype == torch.float32 else assert_equal
    compare(got, want)
    spec = AttnSpec(2, 1, 64, 1.0, 16)
    transform = HeadTransform(None, None, ours.scale(), ours.scale(), 1e-6)
    qkv = torch.cat([x, x, x, x], 1)  # two heads of q, one of k, one of v
    q, k, v = split_heads(qkv, transform, Rotation(None, None), spec)
    compare(q[:, 0], theirs(x).detach())
    compare(k[:, 0], theirs(x).detach())
    assert torch.equal(v[:, 0], x)


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want)


def test_embeddings_are_scaled_by_a_rounded_number() -> None:
    config = config_of("gemma3") | {"hidden_size": 50}  # sqrt(50) is no bfloat16
    spec = spec_of(config)
    heads = AttnSpec(4, 2, 16, 1.0, 4)
    decoder = Decoder(spec, heads, 16, torch.bfloat16, CPU)
    theirs = Gemma3TextScaledWordEmbedding(10, 50, 0, 50**0.5).bfloat16()
    ids = torch.tensor([3, 4])
    want = theirs(ids).detach()
    assert torch.equal(theirs.weight[ids].detach() * decoder.embed_scale, want)
    assert not torch.equal(theirs.weight[ids].detach() * spec.embed_scale, want)
