"""Mixture of experts: routing at its extremes, rows' bits, incomplete checkpoints and counters.

That each family's logits and tokens equal transformers' is `test_parity.py`, and that they do not
depend on the batch is `test_families.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from quire.cli.inspect import inspect
from quire.config import EngineArgs
from quire.engine.build import build_engine
from quire.errors import CheckpointError, NotSupported
from quire.models.registry import spec_of
from quire.models.spec import RouterSpec
from quire.native.library import find_library
from quire.nn.experts import Experts
from quire.nn.ops import Visits
from quire.ops.route import choose_experts, sigmoid
from quire.ops.select import ops_of
from quire.ops.torch_ops import TorchOps
from tests.hf import SPARSE, StateDictCheckpoint, _llama_like, greedy, tiny_engine, tiny_model
from tests.model.records import NUM_TOKENS, records
from tests.model.test_parity import make, prompts, run

CPU = torch.device("cpu")


# ------------------------------------------------------------ routing


def steer(model: Any, order: Sequence[int]) -> None:
    """Every token has a large first feature, and routers look at it alone: all go to order[0],
    then order[1], and so on."""
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 30.0
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate.zero_()
            for rank, expert in enumerate(order):
                gate[expert, 0] = 0.2 * (len(order) - rank)


@pytest.mark.parametrize("top_k", [1, 2])
def test_all_tokens_to_the_same_experts(top_k: int) -> None:
    """Red when an expert without tokens, or one with all of them, is handled wrong."""
    torch.manual_seed(1)
    model = _llama_like("Mixtral", num_local_experts=5, num_experts_per_tok=top_k).eval()
    steer(model, [3, 1, 0, 4, 2])
    engine = tiny_engine(model, max_num_batched_tokens=24)
    engine.runner.min_dropped = 1
    loads = engine.runner.model.count_expert_loads()
    some = prompts(5, seed=2)
    requests = [make(i, p, 6) for i, p in enumerate(some)]
    run(engine, requests)
    for request, prompt in zip(requests, some, strict=True):
        assert request.output == greedy(model, prompt, 6)
    num_fed = sum(map(len, some)) + 5 * 5  # the last token of each is drawn, never fed
    num_drawn = 5 * 6  # rows that reach the experts of the last layer

    def only_steered(count: int) -> list[int]:
        return [0, count if top_k == 2 else 0, 0, count, 0]

    assert loads.tolist() == [only_steered(num_fed)] * 2 + [only_steered(num_drawn)]


@pytest.mark.parametrize("normalize", [True, False])
def test_deepseeks_rule_is_transformers(normalize: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=normalize,
    )
    torch.manual_seed(0)
    theirs = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        theirs.weight.normal_()
        theirs.e_score_correction_bias.normal_(0, 0.3)
        x = torch.randn(50, 32)
        logits, weights, experts = theirs(x)
    rule = RouterSpec(
        16, 4, score="sigmoid", normalize=normalize, num_groups=4, top_groups=2, scale=2.5
    )
    ours = choose_experts(logits, rule, theirs.e_score_correction_bias)
    # They leave the order of the chosen open.
    there = torch.zeros(50, 16).scatter_(1, experts, weights)
    here = torch.zeros(50, 16).scatter_(1, ours.experts, ours.weights)
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def test_qwen_rounds_its_weights_and_mixtral_does_not() -> None:
    logits = torch.randn(20, 8).bfloat16()
    exact = choose_experts(logits, RouterSpec(8, 2)).weights
    rounded = choose_experts(logits, RouterSpec(8, 2, rounds=True)).weights
    assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact)
    for family in SPARSE:
        moe = spec_of(StateDictCheckpoint(tiny_model(family)).config).moe
        assert moe is not None and moe.router.rounds == family.startswith("qwen")


@pytest.mark.parametrize(
    "wish",
    [{"top_k": 9}, {"num_groups": 3}, {"num_groups": 4, "top_groups": 5}, {"num_groups": 8}],
    ids=str,
)
def test_impossible_routers_are_refused(wish: dict[str, int]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: got"):
        RouterSpec(**{"num_experts": 8, "top_k": 2, **wish})


# ------------------------------------------------------------ bits


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise is MKL's")
def test_rows_of_experts_and_routers_keep_their_bits() -> None:
    torch.manual_seed(0)
    experts = Experts(7, 64, 56, torch.float32, CPU)
    for parameter in experts.parameters.values():
        parameter.tensor.normal_()
    experts.finish(ops_of(CPU, find_library().library))
    x, logits = torch.randn(90, 64), torch.randn(90, 7)
    visits = choose_experts(logits, RouterSpec(7, 3))
    whole, gates = experts(x, visits, None), sigmoid(logits)
    for rows in (slice(0, 1), slice(5, 8), slice(89, 90), slice(3, 71)):
        again = choose_experts(logits[rows], RouterSpec(7, 3))
        assert torch.equal(again.experts, visits.experts[rows])
        assert torch.equal(again.weights, visits.weights[rows])
        assert torch.equal(experts(x[rows], again, None), whole[rows])
        assert torch.equal(sigmoid(logits[rows]), gates[rows])


def test_only_visited_experts_are_multiplied() -> None:
    """Red when the cost follows the experts there are: an unvisited one holds no kernel at all."""
    experts = Experts(64, 16, 16, torch.float32, CPU)
    for parameter in experts.parameters.values():
        parameter.tensor.normal_()
    called: list[int] = []

    class Spy(TorchOps):
        def linear(self, weights: Any, bias: Tensor | None, gate: str | None = None) -> Any:
            kernel, number = super().linear(weights, bias, gate), len(made)
            made.append(kernel)
            return lambda x: called.append(number % 64) or kernel(x)

    made: list[Any] = []
    experts.finish(Spy())
    experts(torch.randn(3, 16), Visits(torch.tensor([[5], [9], [5]]), torch.ones(3, 1)), None)
    assert sorted(called) == [5, 5, 9, 9]  # up and down


# ------------------------------------------------------------ checkpoints


def small_args(**changes: Any) -> EngineArgs:
    words = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 22, "max_model_len": 64}
    return EngineArgs(**{**words, **changes})


def test_published_configs_say_num_experts() -> None:
    config = StateDictCheckpoint(tiny_model("qwen3-moe")).config
    older = {k: v for k, v in config.items() if k != "num_local_experts"} | {"num_experts": 8}
    assert spec_of(older) == spec_of(config)


class Without(StateDictCheckpoint):
    def __init__(self, model: Any, lost: str) -> None:
        super().__init__(model)
        for i in range(3):
            fused = self.tensors.pop(f"model.layers.{i}.mlp.experts.down_proj")
            for e, weight in enumerate(fused):
                self.tensors[f"model.layers.{i}.mlp.experts.{e}.down_proj.weight"] = weight
        del self.tensors[lost]


def test_a_missing_expert_is_named() -> None:
    lost = "model.layers.1.mlp.experts.4.down_proj.weight"
    with pytest.raises(CheckpointError, match=f"1 tensors are missing.*{lost}"):
        build_engine(small_args(), Without(tiny_model("qwen3-moe"), lost))


@pytest.mark.parametrize("family", SPARSE)
def test_dummy_weights_generate(family: str) -> None:
    checkpoint = StateDictCheckpoint(tiny_model(family))
    checkpoint.tensors.clear()
    engine = build_engine(small_args(load_format="dummy"), checkpoint)
    assert len(records(engine, [[5, 6, 7]])[0]) == 8


def test_half_precision_stays_near() -> None:
    """The path without packed weights: experts are views of one fused tensor."""
    model = tiny_model("qwen2-moe")
    want = model(torch.tensor([[5, 9, 17, 40]])).logits[0, -1].log_softmax(-1)
    ((record, *_),) = records(tiny_engine(model, dtype="float16"), [[5, 9, 17, 40]])
    assert abs(record.logprob - want[record.token].item()) < 0.02


# ------------------------------------------------------------ what is reported


def test_loads_start_from_zero_and_dense_models_have_none() -> None:
    engine = tiny_engine(tiny_model("qwen3-moe-mixed"))
    engine.runner.min_dropped = 1
    loads = engine.runner.model.count_expert_loads()
    assert loads.shape == (1, 4)  # of four layers one is sparse, the last
    records(engine, [[5, 6, 7]])
    assert int(loads.sum()) == 2 * NUM_TOKENS
    assert engine.runner.model.count_expert_loads() is loads and not loads.any()
    with pytest.raises(NotSupported, match="llama has no experts"):
        tiny_engine(tiny_model("llama-gqa")).runner.model.count_expert_loads()


@pytest.mark.parametrize("family", [*SPARSE, "llama-gqa"])
def test_parameters_are_counted(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    spec = spec_of(StateDictCheckpoint(model).config)
    assert spec.num_params == sum(p.numel() for p in model.parameters() if p.ndim > 1)
    if spec.moe is None:
        assert spec.num_active_params == spec.num_params
        return
    expert = 3 * spec.hidden_size * spec.moe.ffn_size
    sparse = sum(map(spec.is_sparse, range(spec.num_layers)))
    idle = sparse * (spec.moe.router.num_experts - spec.moe.router.top_k) * expert
    assert spec.num_active_params == spec.num_params - idle
    model.save_pretrained(tmp_path)
    shown = {fact.what: fact for fact in inspect(small_args(model=str(tmp_path))).facts}
    assert shown["experts"].value == spec.moe.router.num_experts
    assert f"{spec.moe.router.top_k} per token in {sparse} layers" in shown["experts"].note
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert shown["active parameters"].value == spec.num_active_params + norms
