"""SamplingParams end to end through LLM: what callers see, in vLLM's shapes.

One engine for the file: every test also runs on whatever the ones before left in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, RequestOutput, SamplingParams
from quire.errors import BadRequest, NotSupported
from tests.engine.tiny import BOS, EOS

PROMPTS = ["the quick brown fox", "def main():", "naïve café", "the lazy dog jumps over the fox"]


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


@pytest.fixture(scope="module")
def logprobs_of(oracle_folder: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """Tokens -> [positions, vocab] log-probabilities, by transformers."""
    model = transformers.LlamaForCausalLM.from_pretrained(oracle_folder).eval()

    @torch.no_grad()
    def compute(tokens: Sequence[int]) -> torch.Tensor:
        return model(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)

    return compute


def one(llm: LLM, prompt: Any = PROMPTS[0], **params: Any) -> RequestOutput:
    values = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    (output,) = llm.generate(prompt, SamplingParams(**values), use_tqdm=False)
    assert output.finished and all(o.finished for o in output.outputs)
    return output


def tokens(llm: LLM, prompt: Any = PROMPTS[0], **params: Any) -> list[int]:
    return one(llm, prompt, **params).outputs[0].token_ids


# ------------------------------------------------------------ shapes


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Red when outputs are ordered by when they finish."""
    lengths = [9, 1, 5, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == PROMPTS
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert len({o.request_id for o in outputs}) == 4
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt_token_ids == llm.get_tokenizer().encode(prompt)
        assert output.prompt_token_ids[0] == BOS
        (answer,) = output.outputs
        assert answer.text == llm.get_tokenizer().decode(answer.token_ids)
        assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
        assert answer.logprobs is None and answer.cumulative_logprob is None
        assert output.prompt_logprobs is None


def test_text_and_ids_are_the_same_prompt(llm: LLM) -> None:
    """Red when one way of giving a prompt adds or loses tokens."""
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    for prompt in (ids, {"prompt_token_ids": ids}, {"prompt": PROMPTS[0]}, [PROMPTS[0]], [ids]):
        assert tokens(llm, prompt) == tokens(llm)


def test_default_params_and_argument_counts(llm: LLM) -> None:
    """Red when a list of the wrong length is zipped short."""
    (output,) = llm.generate(PROMPTS[0], use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    with pytest.raises(BadRequest, match="2 sampling_params for 3"):
        llm.generate(PROMPTS[:3], [SamplingParams()] * 2)
    with pytest.raises(BadRequest, match="1 priorities for 2"):
        llm.generate(PROMPTS[:2], priority=[1])
    assert llm.generate([], use_tqdm=False) == []


def test_metrics_are_in_order(llm: LLM) -> None:
    """Red when a reading is missing or taken from another request."""
    output = one(llm)
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.last_token_time
    assert m.ttft == m.first_token_time - m.arrival_time >= 0
    assert m.num_preemptions == 0


def test_cached_tokens_are_reported(llm: LLM) -> None:
    """Red when a repeated prompt is not found or not told of."""
    prompt = "the fox quick lazy over jumps dog main café " * 2
    first, second = one(llm, prompt), one(llm, prompt)
    count = len(first.prompt_token_ids)
    assert first.num_cached_tokens < 8 and "not seen before" in first.cache_note
    assert second.num_cached_tokens == min(count // 4 * 4, count - 1)
    assert second.cache_note == ""
    assert llm.reset_prefix_cache() > 0
    third = one(llm, prompt)
    assert third.num_cached_tokens == 0
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids


# ------------------------------------------------------------ logprobs


@pytest.mark.parametrize("num", [0, 1, 5])
def test_logprobs_as_vllm_shapes_them(
    llm: LLM, num: int, logprobs_of: Callable[[Sequence[int]], torch.Tensor], near: float
) -> None:
    """Red when the chosen token is missing, ranks are off, or penalties leak into the numbers."""
    output = one(llm, logprobs=num, temperature=0.9, seed=3, presence_penalty=1.0)
    answer = output.outputs[0]
    assert len(answer.logprobs) == len(answer.token_ids) == 12
    want = logprobs_of(output.prompt_token_ids + answer.token_ids)
    start = len(output.prompt_token_ids) - 1
    for position, (token, found) in enumerate(
        zip(answer.token_ids, answer.logprobs, strict=True), start
    ):
        assert next(iter(found)) == token, "the chosen token comes first"
        assert num <= len(found) <= num + 1
        row = want[position]
        for id, record in found.items():
            assert abs(record.logprob - row[id].item()) < near
            ranks = [int((row > row[id] + by).sum()) + 1 for by in (near, -near)]
            assert ranks[0] <= record.rank <= ranks[1]
            assert record.decoded_token == llm.get_tokenizer().decode([id], False)
        ranks = {record.rank for record in found.values()}
        assert set(range(1, num + 1)) <= ranks
    total = sum(
        found[t].logprob for t, found in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert math.isclose(answer.cumulative_logprob, total, rel_tol=1e-9)


def test_prompt_logprobs(
    llm: LLM, logprobs_of: Callable[[Sequence[int]], torch.Tensor], near: float
) -> None:
    """Red when the first entry is not None, positions shift by one, or a chunk is left out."""
    prompt = " ".join(PROMPTS * 2)
    output = one(llm, prompt, prompt_logprobs=2, max_tokens=1)
    ids = output.prompt_token_ids
    assert len(ids) > 32, "must take more than one step"
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    want = logprobs_of(ids)
    for position, found in enumerate(output.prompt_logprobs[1:], 1):
        assert next(iter(found)) == ids[position]
        for id, record in found.items():
            assert abs(record.logprob - want[position - 1, id].item()) < near
    assert one(llm, [5], prompt_logprobs=1).prompt_logprobs == [None]


def test_logprobs_of_one_request_do_not_reach_another(llm: LLM) -> None:
    """Red when a step's widest wish is given to everyone."""
    wishes = [SamplingParams(temperature=0.0, max_tokens=6, logprobs=n) for n in (None, 4, 0, None)]
    outputs = llm.generate(PROMPTS, wishes, use_tqdm=False)
    assert [o.outputs[0].logprobs is None for o in outputs] == [True, False, False, True]
    assert all(len(found) <= 1 for found in outputs[2].outputs[0].logprobs)


# ------------------------------------------------------------ ends


def test_stop_string_cuts_text_and_names_itself(llm: LLM) -> None:
    """Red when text after the stop is shown, or generation goes on."""
    whole = one(llm, max_tokens=30)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    want = text[: text.index(stop)]
    answer = one(llm, max_tokens=30, stop=["no such text", stop]).outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (want, "stop", stop)
    assert answer.token_ids == whole.outputs[0].token_ids[: len(answer.token_ids)]
    assert len(answer.token_ids) < 30
    kept = one(llm, max_tokens=30, stop=stop, include_stop_str_in_output=True).outputs[0]
    assert kept.text == want + stop
    assert llm.stats().pages_live == 0 and llm.stats().num_running == 0


def test_stop_token(llm: LLM) -> None:
    """Red when a stop id is not reported or the token is lost."""
    whole = tokens(llm, max_tokens=20)
    stop = whole[9]
    answer = one(llm, max_tokens=20, stop_token_ids=[stop]).outputs[0]
    assert answer.token_ids == whole[: whole.index(stop) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_eos_and_ignore_eos(llm: LLM) -> None:
    """Red when eos does not end, is not ignored when asked, or shows in the text."""
    push = {"logit_bias": {EOS: 100.0}}
    answer = one(llm, ignore_eos=False, **push).outputs[0]
    assert answer.token_ids == [EOS]
    assert (answer.finish_reason, answer.stop_reason, answer.text) == ("stop", None, "")
    ignored = one(llm, ignore_eos=True, **push).outputs[0]
    assert ignored.token_ids == [EOS] * 12
    assert (ignored.finish_reason, ignored.text) == ("length", "")
    assert one(llm, skip_special_tokens=False, **push).outputs[0].text == "</s>" * 12


def test_min_tokens_holds_back_eos_and_stop_ids(llm: LLM) -> None:
    """Red when an end is drawn before min_tokens, or still banned after."""
    for end, params in ((EOS, {"ignore_eos": False}), (7, {"stop_token_ids": [7]})):
        answer = one(llm, min_tokens=5, logit_bias={end: 50.0}, **params).outputs[0]
        assert len(answer.token_ids) == 6
        assert answer.token_ids[5] == end and end not in answer.token_ids[:5]
        assert answer.finish_reason == "stop"


def test_context_is_the_limit_without_max_tokens(llm: LLM) -> None:
    """Red when max_tokens=None means sixteen, or runs past max_model_len."""
    output = one(llm, [5] * 100, max_tokens=None)
    assert len(output.outputs[0].token_ids) == 28
    assert output.outputs[0].finish_reason == "length"


# ------------------------------------------------------------ steering


@pytest.mark.parametrize("weights", ["float32"], indirect=True)
def test_bad_words_never_appear(llm: LLM) -> None:
    """Red when a word of several tokens gets through, or everything near it is banned."""
    free = one(llm, max_tokens=20).outputs[0]
    tokenizer = llm.get_tokenizer()
    word = next(
        tokenizer.decode(free.token_ids[i : i + 3])
        for i in range(17)
        if "\ufffd" not in tokenizer.decode(free.token_ids[i : i + 3])
        and tokenizer.decode(free.token_ids[i : i + 3]).strip()
    )
    spelt = tokenizer.encode(word.lstrip(), add_special_tokens=False)
    answer = one(llm, max_tokens=20, bad_words=[word]).outputs[0]
    runs = [answer.token_ids[i : i + len(spelt)] for i in range(20)]
    assert spelt not in runs
    assert answer.token_ids != free.token_ids


def test_allowed_tokens_only(llm: LLM) -> None:
    """Red when another token is drawn, greedy or not."""
    for params in ({}, {"temperature": 2.0, "seed": 1}):
        drawn = tokens(llm, allowed_token_ids=[40, 50, 60], max_tokens=20, **params)
        assert set(drawn) <= {40, 50, 60}
    assert len(set(drawn)) > 1


def test_logit_bias(llm: LLM) -> None:
    """Red when a bias is not added, or stays on the row for the next request."""
    plain = tokens(llm)
    assert tokens(llm, logit_bias={33: 100.0}) == [33] * 12
    away = tokens(llm, logit_bias=dict.fromkeys(set(plain), -100.0))
    assert not set(away) & set(plain)
    assert tokens(llm) == plain


def test_repetition_is_penalised(llm: LLM) -> None:
    """Red when penalties forget the prompt or the output."""
    loop = {"logit_bias": {33: 15.0}}
    assert tokens(llm, **loop) == [33] * 12
    assert tokens(llm, repetition_penalty=10.0, **loop) != [33] * 12
    assert tokens(llm, [33, 34], repetition_penalty=10.0, **loop)[0] != 33
    # presence and frequency look at the output only
    assert tokens(llm, [33, 34], presence_penalty=2.0, max_tokens=1, **loop) == [33]


# ------------------------------------------------------------ copies and seeds


def test_copies(llm: LLM) -> None:
    """Red when copies are in the wrong order, equal, or differ from single requests."""
    output = one(llm, n=4, temperature=1.0, seed=11, logprobs=1)
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 4
    singles = [tokens(llm, temperature=1.0, seed=11 + i) for i in range(4)]
    assert [o.token_ids for o in output.outputs] == singles
    assert all(len(o.logprobs) == 12 for o in output.outputs)


def test_seeds_are_reproducible_across_engines(llm: LLM, make_llm: Callable[..., LLM]) -> None:
    """Red when a draw depends on anything but seed, position and logits."""
    other = make_llm(page_size=16, max_num_seqs=2, seed=99)
    seeded = {"temperature": 1.0, "seed": 5}
    assert tokens(llm, **seeded) == tokens(other, **seeded)
    assert tokens(llm, **seeded) != tokens(llm, temperature=1.0, seed=6)


def test_unseeded_requests_follow_the_engine_s_seed(make_llm: Callable[..., LLM]) -> None:
    """Red when a run cannot be repeated, or every request draws alike."""
    first, again, other = make_llm(seed=1), make_llm(seed=1), make_llm(seed=2)
    runs = [[tokens(m, temperature=1.0) for _ in range(3)] for m in (first, again, other)]
    assert runs[0] == runs[1] != runs[2]
    assert len(set(map(tuple, runs[0]))) == 3


# ------------------------------------------------------------ chat, priorities, no text


def test_chat_renders_the_template_once(llm: LLM) -> None:
    """Red when the rendered chat gets a second beginning token."""
    messages = [{"role": "user", "content": "the fox"}]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    assert output.prompt == "<s>user: the fox\nassistant:"
    assert output.prompt_token_ids.count(BOS) == 1
    several = llm.chat([messages, messages[:1]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in several] == [output.outputs[0].token_ids] * 2
    streamed = list(llm.stream_chat(messages, params))
    assert [t for e in streamed for t in e.token_ids] == output.outputs[0].token_ids


def test_priorities_reach_the_scheduler(make_llm: Callable[..., LLM]) -> None:
    """Red when `priority` is dropped between LLM and the waiting line."""
    llm = make_llm(max_num_seqs=1, scheduling_policy="priority", priority_aging_s=1e6)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False, priority=[2, 0, 1])
    started = [o.metrics.first_scheduled_time for o in outputs]
    assert sorted(range(3), key=started.__getitem__) == [1, 2, 0]


def test_without_a_tokenizer(make_llm: Callable[..., LLM]) -> None:
    """Red when skip_tokenizer_init cannot serve ids, or pretends to serve text."""
    llm = make_llm(skip_tokenizer_init=True)
    output = one(llm, {"prompt_token_ids": [5, 6, 7]}, logprobs=1)
    assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].text == ""
    assert all(r.decoded_token is None for f in output.outputs[0].logprobs for r in f.values())
    ended = tokens(llm, [5, 6, 7], ignore_eos=False, logit_bias={EOS: 100.0})
    assert ended == [EOS], "eos still ends, from the model's config"
    with pytest.raises(BadRequest, match="skip_tokenizer_init"):
        llm.generate("text")
    with pytest.raises(NotSupported, match="tokenizer"):
        llm.chat([{"role": "user", "content": "x"}])


def test_without_detokenizing(llm: LLM) -> None:
    """Red when detokenize=False still pays for text."""
    answer = one(llm, detokenize=False).outputs[0]
    assert answer.text == "" and answer.token_ids == tokens(llm)
