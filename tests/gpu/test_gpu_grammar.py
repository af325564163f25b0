"""Grammars on CUDA: the mask kernel compiled, and masks with graphs and a step of lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import transformers

from quire.kernels.token_mask import ban_unset
from quire.llm import LLM
from quire.params import SamplingParams, StructuredOutputsParams
from quire.sample.inputs import TokenMask
from quire.sample.mask import apply_mask
from tests.engine.tiny import random_llama, save_tiny_folder
from tests.grammar.cases import WISHES, Wish
from tests.text.tiny_tokenizers import byte_level

BLANKS = {
    token: -30.0
    for token in range(byte_level().get_vocab_size())
    if byte_level().decode([token]).isspace()
}
PROMPTS = ["the quick", "fox", "def main():\n    return", "naïve", "the quick brown fox jumps over"]
needs_grammars = pytest.mark.skipif(
    not all(map(find_spec, ("llguidance", "jsonschema"))), reason="needs llguidance and jsonschema"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpu-llama")
    model = random_llama(
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    save_tiny_folder(made, model)
    return made


@pytest.fixture(scope="module")
def make(folder: Path) -> Callable[..., LLM]:
    def make(**changes: Any) -> LLM:
        args = {
            "device": "cuda",
            "dtype": "bfloat16",
            "kv_cache_memory": 1 << 26,
            "max_model_len": 512,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 256,
            **changes,
        }
        return LLM(str(folder), **args)

    return make


def params(wish: Wish | None, seed: int) -> SamplingParams:
    if wish is None:
        return SamplingParams(max_tokens=60, seed=seed, ignore_eos=True)
    bias = BLANKS if wish.name != "choice-prefixes" else None
    return SamplingParams(
        max_tokens=150, seed=seed, structured_outputs=wish.params, logit_bias=bias
    )


EVERYONE: list[Wish | None] = [None, *WISHES, None, *WISHES, *WISHES, None]


def tokens(llm: LLM, wishes: Sequence[Wish | None] = EVERYONE) -> list[list[int]]:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(wishes))]
    wanted = [params(wish, seed) for seed, wish in enumerate(wishes)]
    found = []
    for wish, output in zip(wishes, llm.generate(prompts, wanted, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason in ("stop", "length"), answer
        if wish is not None and answer.finish_reason == "stop":
            assert wish.holds(answer.text), (wish.name, answer.text)
        found.append(answer.token_ids)
    assert len(llm._engine.runner.matchers) == 0
    return found


@pytest.mark.parametrize("vocab_size", [380, 50257, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel(vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    logits = torch.randn(70, vocab_size, dtype=dtype)
    rows = torch.from_numpy(rng.permutation(70)[:33].copy())
    words = rng.integers(-(2**31), 2**31, (33, -(-vocab_size // 32)), dtype=np.int32)
    want, bits = logits.clone(), torch.from_numpy(words)
    apply_mask(want, TokenMask(rows, bits))
    got = logits.cuda()
    ban_unset(got, rows.cuda(), bits.cuda())
    assert torch.equal(got.cpu(), want)


@needs_grammars
def test_graphs_and_overlap_change_nothing(make: Callable[..., LLM]) -> None:
    """Red when the mask of step n + 1 is made before the token of step n was seen."""
    llm = make()
    assert llm._engine.core.lag == 1
    whole = tokens(llm)
    assert llm._engine.runner.graphs is not None and llm._engine.runner.graphs.graphs
    llm._engine.core.lag = 0
    assert tokens(llm) == whole, "lag changes tokens"
    eager = make(enforce_eager=True, max_num_batched_tokens=32, max_chunk=5)
    assert tokens(eager) == whole, "graphs or chunks change tokens"


@needs_grammars
def test_neighbours_do_not_notice(make: Callable[..., LLM]) -> None:
    llm = make()
    whole = tokens(llm)
    free = [i for i, wish in enumerate(EVERYONE) if wish is None]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in free]
    outputs = llm.generate(prompts, [params(None, i) for i in free], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [whole[i] for i in free]


@needs_grammars
def test_preemption(make: Callable[..., LLM]) -> None:
    large = make(max_model_len=200)
    whole = tokens(large)
    pool = large._engine.runner.pool
    small = make(max_model_len=200, kv_cache_memory=pool.data.nbytes // pool.num_pages * 24)
    assert tokens(small) == whole
    assert small.stats().num_preempted > 0, "the pool was meant to be too small"


@needs_grammars
def test_failures_stay_alone(make: Callable[..., LLM]) -> None:
    yes = StructuredOutputsParams(choice=["yes"])
    base = SamplingParams(max_tokens=10, structured_outputs=yes)
    wishes = [base.with_(min_tokens=8), base.with_(bad_words=["e"]), base, params(None, 1)]
    outputs = make().generate(["the fox"] * 4, wishes, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    assert [f.finish_reason for f in found] == ["error", "error", "stop", "length"]
    assert [f.text for f in found[:3]] == ["yes", "y", "yes"]


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(make: Callable[..., LLM], folder: Path, pooling: str) -> None:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    llm = make(max_chunk=7)
    for output in llm.embed(PROMPTS, pooling, use_tqdm=False):
        states = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
        want = states.mean(dim=0) if pooling == "mean" else states[-1]
        got = torch.tensor(output.outputs.embedding)
        assert torch.cosine_similarity(got, want, dim=0) > 0.99
