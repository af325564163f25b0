"""`tp_reduce="fast"` splits sums: close to one rank's numbers, and the same for any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.dist.cuts import Cut
from quire.engine.rank_group import RankGroup
from quire.errors import NotSupported
from quire.load.loader import own_inputs
from quire.lora.request import LoRARequest
from quire.models.tiny import tiny_model
from quire.nn.parameter import Kept, Parameter
from quire.quant.load_forms import load_form
from tests.dist.group import PARAMS, PROMPTS, alone, answers, model_on
from tests.dist.test_ranks import CASES, IS_LONG
from tests.lora.cases import write_adapter

# How far log-probabilities may be apart. Floats: the order of a sum. Packed weights: inputs are
# rounded as well, in proportion to the largest of a rank's own.
FLOATS, PACKED = 2e-5, 5e-3
PACKED_CASES = ("int4", "int8", "fp8")
QUICK = ("llama", "windows", "experts", "latents", "int8")
READ = [SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)] * len(PROMPTS)


def prompt_logprobs(llm: LLM, lora: Any = None) -> list[dict[int, float]]:
    outputs = llm.generate(PROMPTS, READ, use_tqdm=False, lora_request=lora)
    found = [at for output in outputs for at in output.prompt_logprobs or () if at is not None]
    return [{token: its.logprob for token, its in at.items()} for at in found]


def distance(ours: list[dict[int, float]], theirs: list[dict[int, float]]) -> float:
    pairs = list(zip(ours, theirs, strict=True))
    shared = [abs(a[token] - b[token]) for a, b in pairs for token in a if token in b]
    assert len(shared) > 2 * len(pairs), "other tokens are likely"
    return max(shared)


@pytest.mark.parametrize("name", [c for c in CASES if c != "nf4"] if IS_LONG else QUICK)
def test_split_sums_are_close(name: str, group: RankGroup, tmp_path: Path) -> None:
    """Red when a rank adds another's inputs, a bias counts twice, or a batch changes bits."""
    family, changes, args = CASES[name]
    folder = tiny_model(family, tmp_path, **changes)
    expected = prompt_logprobs(alone(folder, **args))
    with model_on(group, folder, tp_reduce="fast", **args) as llm:
        found = prompt_logprobs(llm)
        assert distance(found, expected) < (PACKED if name in PACKED_CASES else FLOATS)
        together = answers(llm)
        assert [answers(llm, [p], [q])[0] for p, q in zip(PROMPTS, PARAMS, strict=True)] == together


def test_what_shares_a_scale_is_not_split() -> None:
    """Red when a weight is cut in the middle of a block."""
    weight = load_form("nf4").of(torch.randn(8, 128))
    assert weight is not None
    for end, fits in ((64, True), (48, False)):
        kept = Kept({}, columns=Cut(0, end, 128))
        half = Parameter((8, end), torch.float32, torch.device("cpu"), None, True, kept)
        if fits:
            same = own_inputs(weight, half, "w").dequantize()
            assert same.equal(weight.dequantize()[:, :end])
        else:
            with pytest.raises(NotSupported, match="tp_reduce='exact'"):
                own_inputs(weight, half, "w")


def test_adapters_split_their_sums_too(group: RankGroup, tmp_path: Path) -> None:
    """Red when a rank's share of an adapter is that of other inputs."""
    folder = tiny_model("qwen3", tmp_path / "model", hidden_size=64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    lora = [LoRARequest("one", 1, str(write_adapter(tmp_path / "one", theirs)))] * len(PROMPTS)
    one = alone(folder)
    expected = prompt_logprobs(one, lora)
    assert expected != prompt_logprobs(one)
    with model_on(group, folder, tp_reduce="fast") as llm:
        assert distance(prompt_logprobs(llm, lora), expected) < FLOATS
