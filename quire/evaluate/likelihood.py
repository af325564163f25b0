"""How likely a model finds answers that others gave: nats a token, the same for all lengths.

The score of `quire route fit --likelihood`: what the large model would have said itself is likely
to it, and so is what the small one said where the two agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.llm import LLM
from quire.offline.chat_prompt import ChatStyle
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from quire.routing.ask import read_ask


def answer_likelihoods(llm: LLM, asked: Sequence[tuple[dict[str, Any], str]]) -> list[float]:
    """The mean logprob of each answer's tokens behind its prompt; an empty answer has the worst."""
    tokenizer = llm.get_tokenizer()
    starts, prompts = [], []
    for record, answer in asked:
        before = _prompt(llm, record)
        said = tokenizer.encode(answer, add_special_tokens=False)
        starts.append(len(before))
        prompts.append({"prompt_token_ids": [*before, *said]})
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = [
        _mean(output, start)
        for output, start in zip(llm.generate(prompts, params), starts, strict=True)
    ]
    worst = min((one for one in found if one is not None), default=0.0)
    return [worst if one is None else one for one in found]


def _prompt(llm: LLM, record: dict[str, Any]) -> list[int]:
    messages = record.get("messages") or [{"role": "user", "content": read_ask(record).text}]
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(str(one.get("content")) for one in messages) + "\n")
    made = ChatStyle.of(record.get("tools")).prompt(tokenizer, messages)
    return list(made["prompt_token_ids"])


def _mean(output: RequestOutput, start: int) -> float | None:
    assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
    ids = output.prompt_token_ids
    found = [
        known[token].logprob
        for token, known in zip(ids[start:], output.prompt_logprobs[start:], strict=True)
        if known is not None
    ]
    return sum(found) / len(found) if found else None
