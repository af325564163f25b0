"""One sparse block against transformers' own, apart from attention: DeepSeek's and gpt-oss's.

DeepSeek's shared experts stand behind no gate, and a correction decides who is chosen; gpt-oss's
router and experts have biases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from quire.models.spec import ModelSpec, MoeSpec, RouterSpec
from quire.native.library import find_library
from quire.nn.moe import SparseMLP
from quire.ops.select import ops_of

CPU = torch.device("cpu")
HIDDEN, FFN, EXPERTS = 32, 24, 16


def block(moe: MoeSpec) -> SparseMLP:
    spec = ModelSpec("test", HIDDEN, 1, 4, 4, 8, FFN, 10, 64, moe=moe)
    return SparseMLP(spec, torch.float32, CPU)


def fill(ours: SparseMLP, values: dict[str, Tensor]) -> None:
    """Every tensor of the block, by name; none may be left over on either side."""
    tensors = {name: own.tensor for name, own in ours.parameters().items()}
    for name, linear in ours.linears().items():
        tensors[f"{name}.weight"] = linear.weight.tensor
        if linear.bias is not None:
            tensors[f"{name}.bias"] = linear.bias.tensor
    assert tensors.keys() == values.keys()
    for name, tensor in tensors.items():
        tensor.copy_(values[name])
    ours.finish(ops_of(CPU, find_library().library))


def randomize(theirs: Any) -> None:
    for parameter in theirs.parameters():
        parameter.normal_(0, 0.4)


def deepseek_values(theirs: Any) -> dict[str, Tensor]:
    shared = theirs.shared_experts
    return {
        "router.weight": theirs.gate.weight,
        "experts.up": theirs.experts.gate_up_proj,
        "experts.down": theirs.experts.down_proj,
        "shared.up.weight": torch.cat((shared.gate_proj.weight, shared.up_proj.weight)),
        "shared.down.weight": shared.down_proj.weight,
    }


SIZES = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": FFN,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}


@torch.no_grad()
def test_deepseek_v3() -> None:
    torch.manual_seed(0)
    theirs = DeepseekV3MoE(DeepseekV3Config(**SIZES, norm_topk_prob=True)).eval()
    randomize(theirs)
    theirs.gate.e_score_correction_bias.normal_(0, 0.3)
    router = RouterSpec(
        EXPERTS, 4, "sigmoid", num_groups=4, top_groups=2, scale=2.5, correction=True
    )
    ours = block(MoeSpec(router, FFN, shared_ffn_size=2 * FFN, shared_gate=False))
    correction = {"router.correction": theirs.gate.e_score_correction_bias}
    fill(ours, deepseek_values(theirs) | correction)
    x = torch.randn(50, HIDDEN)
    torch.testing.assert_close(ours(x), theirs(x[None])[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(method: str) -> None:
    torch.manual_seed(0)
    config = DeepseekV2Config(**SIZES, topk_method=method, norm_topk_prob=False)
    theirs = DeepseekV2Moe(config).eval()
    randomize(theirs)
    groups = {"num_groups": 4, "top_groups": 2} if method == "group_limited_greedy" else {}
    router = RouterSpec(EXPERTS, 4, normalize=False, group_best=1, scale=2.5, **groups)
    ours = block(MoeSpec(router, FFN, shared_ffn_size=2 * FFN, shared_gate=False))
    fill(ours, deepseek_values(theirs))
    x = torch.randn(50, HIDDEN)
    torch.testing.assert_close(ours(x), theirs(x[None])[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_gpt_oss() -> None:
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=3
    )
    theirs = GptOssMLP(config).eval()
    randomize(theirs)
    router = RouterSpec(EXPERTS, 3, rounds=True, bias=True)
    ours = block(MoeSpec(router, FFN, expert_bias=True, swiglu_limit=7.0))

    def apart(fused: Tensor) -> Tensor:
        """Outputs from gate and up in turn to gates, then ups."""
        return torch.cat((fused[:, 0::2], fused[:, 1::2]), dim=1)

    values = {
        "router.weight": theirs.router.weight,
        "router.bias": theirs.router.bias,
        "experts.up": apart(theirs.experts.gate_up_proj.transpose(1, 2)),
        "experts.up_bias": apart(theirs.experts.gate_up_proj_bias),
        "experts.down": theirs.experts.down_proj.transpose(1, 2),
        "experts.down_bias": theirs.experts.down_proj_bias,
    }
    fill(ours, values)
    x = 4 * torch.randn(50, HIDDEN)  # far enough for gates to reach the limit
    torch.testing.assert_close(ours(x), theirs(x[None])[0][0], rtol=1e-4, atol=1e-4)
