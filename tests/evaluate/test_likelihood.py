"""How likely a model finds answers, against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import torch

from quire import LLM
from quire.evaluate.likelihood import answer_likelihoods
from tests.engine.tiny import random_llama, save_tiny_folder


def test_the_mean_logprob_of_an_answer(tmp_path: Path) -> None:
    """Red when a token of the prompt counts, the first of the answer does not, or lengths do."""
    model = random_llama()
    save_tiny_folder(tmp_path / "tiny", model)
    llm = LLM(str(tmp_path / "tiny"), device="cpu", dtype="float32")
    asked = [({"prompt": "once upon"}, "a time"), ({"prompt": "say"}, "hi"), ({"prompt": "x"}, "")]
    found = answer_likelihoods(llm, asked)
    tokenizer = llm.get_tokenizer()
    for (record, answer), mean in zip(asked[:2], found, strict=False):
        messages = [{"role": "user", "content": record["prompt"]}]
        text = tokenizer.render_chat(messages)  # asks for an answer
        before = tokenizer.encode(text, add_special_tokens=False)
        said = tokenizer.encode(answer, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *said]])).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)[len(before) - 1 : -1]
        want = logprobs.gather(1, torch.tensor(said)[:, None]).mean().item()
        assert abs(mean - want) < 1e-4
    assert found[2] == min(found[:2])  # nothing said is no good answer
