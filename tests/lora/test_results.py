"""An adapter's answers are those of the model it is merged into.

Oracles: transformers with W + scale * B A in its weights, and PEFT itself where it is installed.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.build import Engine
from tests.hf import VOCAB, greedy, tiny_engine, tiny_model
from tests.lora.cases import ALL, ATTENTION, ask, merged, modules, run, write_adapter

FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SHARED = ("gate_proj", "up_proj", "down_proj")
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "all": ("llama-packable", ALL, {}),
    "q and v": ("qwen2", ("q_proj", "v_proj"), {}),
    "rank stabilised": ("llama-gqa", ALL, {"use_rslora": True}),
    "fused by the family": ("phi3", FUSED, {}),
    "transposed": ("gpt2-16", ("c_attn", "c_proj", "c_fc"), {"fan_in_fan_out": True}),
    "norms on both sides": ("gemma3", ALL, {}),
    "norms after": ("olmo2-16", ALL, {}),
    "scaled residuals": ("granite", ALL, {}),
    "beside experts": ("qwen2-moe-16", ATTENTION, {}),
}


@cache
def model(family: str) -> Any:
    return tiny_model(family)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 3, 19)]


def check(engine: Engine, base: Any, want: Any, name: str) -> None:
    """Tokens of the merged model, and its logprobs nearly; base requests in the same batch."""
    asked = [ask(i, prompt, name) for i, prompt in enumerate(prompts(3))]
    plain = [ask(10 + i, prompt, "") for i, prompt in enumerate(prompts(3))]
    found = run(engine, [*asked, *plain])
    for request, own in zip(asked, plain, strict=True):
        prompt = request.tokens[: request.num_prompt].tolist()
        tokens = greedy(want, prompt, 8)
        assert found[request.id][0] == tokens
        assert found[own.id][0] == greedy(base, prompt, 8) != tokens
        with torch.no_grad():
            logits = want(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        got = torch.tensor([one.logprob for one in found[request.id][1]])
        torch.testing.assert_close(got, exact, atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_merged(case: str, tmp_path: Path) -> None:
    """Red when a part's columns, a scale, a gate or a tail is taken for another."""
    family, targets, config = CASES[case]
    base = model(family)
    folder = write_adapter(tmp_path / "a", base, targets, **config)
    engine = tiny_engine(base, lora={"a": str(folder)})
    check(engine, base, merged(base, folder), "a")


def test_without_our_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when only the native kernels can add an adapter."""
    from quire.native import library

    monkeypatch.setattr(library, "find_library", lambda: library.Found(None, "none"))
    monkeypatch.setattr("quire.engine.cpu_path.find_library", library.find_library)
    base = model("llama-gqa")
    folder = write_adapter(tmp_path / "a", base, dtype=torch.bfloat16)
    check(tiny_engine(base, lora={"a": str(folder)}), base, merged(base, folder), "a")


def test_half_precision_and_several_parts_of_a_kind(tmp_path: Path) -> None:
    """Red when weights stored in two bytes are read as four, or one module's scale is another's."""
    base = model("llama-packable")
    folder = write_adapter(tmp_path / "a", base, dtype=torch.bfloat16)
    engine = tiny_engine(base, lora={"a": str(folder)})
    check(engine, base, merged(base, folder), "a")


def test_peft(tmp_path: Path) -> None:
    """The format's own implementation: folders it writes, patterns for single modules included."""
    peft = pytest.importorskip("peft", reason="it is not installed (the extra test)")
    base = tiny_model("llama-packable", seed=5)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=list(ALL),
        use_rslora=True,
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6},
        alpha_pattern={"v_proj": 3, "layers.2.self_attn.q_proj": 5},
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(tiny_model("llama-packable", seed=5), config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    adapted.save_pretrained(tmp_path / "a")
    assert len(modules(base, ALL)) == 21
    check(tiny_engine(base, lora={"a": str(tmp_path / "a")}), base, adapted, "a")
