"""Adapters through `LLM`, as scripts for vLLM ask for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import BadRequest
from quire.lora.request import LoRARequest
from quire.params import BeamSearchParams
from tests.engine.tiny import random_llama
from tests.hf import greedy
from tests.lora.cases import merged, write_adapter

PROMPTS = ["the quick brown fox", "def main():", "the quick brown fox"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("weights", ["float32"], indirect=True)
def test_scripts(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Red when a call runs without the adapter it names, or with one it does not."""
    base = random_llama()
    llm = make_llm(enable_lora=True, max_loras=2, max_lora_rank=16)
    folder = write_adapter(tmp_path / "a", base)
    one = LoRARequest("a", 1, str(folder))
    want = merged(base, folder)

    def tokens(adapter: LoRARequest | list[LoRARequest | None] | None) -> list[list[int]]:
        found = llm.generate(PROMPTS, GREEDY, lora_request=adapter, use_tqdm=False)
        assert [
            o.outputs[0].token_ids for o in found if o.outputs[0].finish_reason != "length"
        ] == []
        return [list(o.outputs[0].token_ids) for o in found]

    ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    adapted, plain = [greedy(want, i, 8) for i in ids], [greedy(base, i, 8) for i in ids]
    assert tokens(one) == adapted != plain
    assert tokens(None) == plain
    assert tokens([one, None, None]) == [adapted[0], plain[1], plain[2]]
    assert tokens(LoRARequest("a")) == adapted  # by name alone, once it is there
    streamed = [t for e in llm.stream(PROMPTS[0], GREEDY, one) for t in e.token_ids]
    assert streamed == adapted[0]
    talk = [{"role": "user", "content": PROMPTS[0]}]
    told = [t for e in llm.stream_chat(talk, GREEDY, one) for t in e.token_ids]
    (whole,) = llm.chat(talk, GREEDY, use_tqdm=False, lora_request=one)
    assert told == list(whole.outputs[0].token_ids)
    (plainly,) = llm.chat(talk, GREEDY, use_tqdm=False)
    assert told != list(plainly.outputs[0].token_ids)
    near = llm.embed(PROMPTS[0], use_tqdm=False, lora_request=one)[0].outputs.embedding
    assert near != llm.embed(PROMPTS[0], use_tqdm=False)[0].outputs.embedding
    beams = llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=1, max_tokens=4), one)
    assert beams[0].sequences[0].tokens[len(ids[1]) :] == adapted[1][:4]
    with pytest.raises(BadRequest, match="unload that first"):
        llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("a", 1, str(tmp_path)))
    with pytest.raises(BadRequest, match="there is no adapter 'b'"):
        llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("b"))


def test_every_call_takes_an_adapter() -> None:
    """Red when a method that runs prompts cannot be told which adapter."""
    for name, method in vars(LLM).items():
        asked = inspect.signature(method).parameters if callable(method) else {}
        runs_prompts = asked.keys() & {"prompt", "prompts", "messages", "text_1"}
        assert name.startswith("_") or not runs_prompts or "lora_request" in asked, name
