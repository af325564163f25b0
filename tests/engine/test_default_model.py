"""The real default model says, token for token, what transformers says with the same weights.

32 prompts run as one continuous batch with chunked prompts, prefix hits and more requests than
rows. The oracle is fed our own answer in one forward: when its argmax at every position is the
token we drew, its greedy generation is our answer, by induction. A difference is reported with the
gap between the oracle's two best logits, so that a tie can be told from a bug; none is allowed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, RequestOutput, SamplingParams
from quire.load.gguf_checkpoint import GGUFCheckpoint

NUM_TOKENS = 40
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

STORY = (
    "The lighthouse at the end of the peninsula had been dark for eleven years when Marta rowed out"
    " to it with a toolbox, two loaves of bread and a dog that was afraid of water. Her grandmother"
    " had kept the lamp, and her grandmother's brother before that, and nobody in the village could"
    " say why it had been given up. Some blamed the new harbour, some the ferry company, and the"
    " priest blamed the radio. Marta did not blame anyone. She wanted to see whether the mechanism"
    " still turned, because she had repaired every clock in three parishes and had begun to feel"
    " that there was nothing left to take apart. The door was not locked. Inside, the stairs wound"
    " upwards past shelves of logbooks, each labelled with a year in the same careful hand."
)
QUESTIONS = [
    "Who kept the lamp before Marta's grandmother?",
    "Why did Marta row out to the lighthouse?",
    "What did she take with her?",
    "Write the next two sentences of the story.",
    "Translate the first sentence into French.",
    "List the people who were blamed.",
    "What was on the shelves?",
    "Give the story a title.",
]
CHATS = [
    "What is the capital of Norway?",
    "Explain photosynthesis to a child of ten.",
    "Write a haiku about rain.",
    "Give three tips for learning to swim.",
    "What is 17 times 23?",
    "Name the planets in order from the sun.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "Correct this sentence: she go to school yesterday.",
    "What is the difference between a virus and a bacterium?",
    "Suggest a name for a bakery.",
    "How do I boil an egg?",
]
TEXTS = [
    "Once upon a time",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "To be, or not to be,",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,",
    "Ingredients:\n- 200 g flour\n-",
    "A",
    "La révolution française",
    '{"name": "Ada", "born":',
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Q: What is gravity?\nA:",
]


def prompts(llm: LLM) -> list[Any]:
    """Questions about one long text, short chats, and plain text of many kinds."""
    tokenizer = llm.get_tokenizer()

    def chat(*turns: str) -> dict[str, Any]:
        roles = ("system", "user") if len(turns) == 2 else ("user",)
        messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]
        return {
            "prompt_token_ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        }

    return [
        *(chat(STORY, question) for question in QUESTIONS),
        *(chat(question) for question in CHATS),
        *TEXTS,
    ]


@pytest.fixture(scope="module")
def outputs(default_model_path: Path) -> Iterator[list[RequestOutput]]:
    llm = LLM(
        str(default_model_path),
        device="cpu",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        kv_cache_memory=512 << 20,
    )
    some = prompts(llm)
    assert len(some) == 32
    done = llm.generate(some, PARAMS, use_tqdm=False)
    stats = llm.stats()
    # It must have been a batch with chunks and hits, or the test proves less than it says.
    assert max(len(output.prompt_token_ids) for output in done) > 128
    assert stats.prefix_hit_tokens > 500
    assert stats.num_steps < sum(len(o.outputs[0].token_ids) for o in done) / 4
    assert stats.pages_live == 0
    del llm
    gc.collect()
    yield done


@pytest.fixture(scope="module")
def oracle(default_model_path: Path) -> Any:
    """transformers with the dequantised weights of the same file, in fp32."""
    checkpoint = GGUFCheckpoint.open(default_model_path)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
    weights = {name: checkpoint.read(name).float() for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied to the embedding
    model.tie_weights()
    return model.float().eval()


@torch.inference_mode()
def differences(oracle: Any, output: RequestOutput) -> list[str]:
    answer = output.outputs[0].token_ids
    assert len(answer) == NUM_TOKENS
    tokens = torch.tensor([output.prompt_token_ids + answer[:-1]])
    logits = oracle(tokens, logits_to_keep=NUM_TOKENS, use_cache=False).logits[0]
    best = logits.topk(2, dim=-1)
    return [
        f"request {output.request_id}, output token {i}: got {got}, transformers says {want};"
        f" its two best logits are {gap:.2e} apart, and ours is"
        f" {best.values[i, 0] - logits[i, got]:.2e} below its best"
        for i, (got, want, gap) in enumerate(
            zip(
                answer,
                best.indices[:, 0].tolist(),
                (best.values[:, 0] - best.values[:, 1]).tolist(),
                strict=True,
            )
        )
        if got != want
    ]


def test_greedy_tokens_equal_transformers(outputs: list[RequestOutput], oracle: Any) -> None:
    """Red when any part of the path from file to token is wrong for a real model."""
    found = [line for output in outputs for line in differences(oracle, output)]
    assert not found, "\n".join(found[:20])


@torch.inference_mode()
def test_the_oracle_s_own_generation_agrees(outputs: list[RequestOutput], oracle: Any) -> None:
    """Keeps the argument of this file honest: generate() with its own cache, on two prompts."""
    for output in (outputs[10], outputs[20]):
        ids = torch.tensor([output.prompt_token_ids])
        made = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=16,
            min_new_tokens=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert made[0, ids.shape[1] :].tolist() == output.outputs[0].token_ids[:16]


def test_answers_read_like_language(outputs: list[RequestOutput]) -> None:
    """Red when weights are scrambled in a way both sides share, such as a wrong dequantisation."""
    text = {output.outputs[0].text for output in outputs[8:9]}.pop()
    assert "Oslo" in text, text
    assert "\ufffd" not in "".join(output.outputs[0].text for output in outputs)


NEAR = 0.02  # mean square root of how far logprobs move; inputs of one int8 give 0.08


def test_packed_products_are_near_fp32(default_model_path: Path, oracle: Any) -> None:
    """Red when inputs of packed products are rounded so coarsely that a near tie falls the other
    way: with one int8 and a scale for 32 inputs, this question gets a wrong answer."""
    llm = LLM(str(default_model_path), device="cpu", max_model_len=512, kv_cache_memory=64 << 20)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answer = llm.chat(asked, greedy, use_tqdm=False)[0]
    assert "The capital of France is Paris." in answer.outputs[0].text
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(STORY)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (story,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    assert story.prompt_logprobs is not None
    said = zip(ids[1:], story.prompt_logprobs[1:], strict=True)
    got = torch.tensor([found[token].logprob for token, found in said if found is not None])
    del llm
    gc.collect()
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        prompt = torch.tensor([answer.prompt_token_ids])
        mask = torch.ones_like(prompt)
        made = oracle.generate(
            prompt, attention_mask=mask, do_sample=False, max_new_tokens=8, eos_token_id=None
        )
    assert (got - want).square().mean().sqrt() < NEAR
    assert made[0, prompt.shape[1] :].tolist() == answer.outputs[0].token_ids
