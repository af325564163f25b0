"""What vLLM documents for its offline API, with only the import changed.

Each test is the body of a script as a user of vLLM writes it; `LLM` here fills in a model small
enough for a test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quire
from quire import LLM, SamplingParams, TextPrompt, TokensPrompt
from quire.errors import BadRequest, NotSupported
from quire.offline.vllm_args import UNNEEDED
from quire.sampling_params import BeamSearchParams, StructuredOutputsParams
from tests.engine.tiny import BOS, random_llama

PROMPTS = ["the quick brown fox", "def main():", "naïve café", "the lazy dog"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(max_num_seqs=16)


# ------------------------------------------------------------ scripts


def test_basic(llm: LLM) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt == prompt and output.outputs[0].text


def test_progress_and_lora_by_place(llm: LLM) -> None:
    """Red when use_tqdm or lora_request can only be given by name."""
    want = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    found = llm.generate(PROMPTS, GREEDY, False, None)
    assert [o.outputs[0].text for o in found] == [o.outputs[0].text for o in want]
    with pytest.raises(BadRequest, match=r"lora_request='adapter'.*want LoRARequest"):
        llm.generate(PROMPTS, GREEDY, False, "adapter")  # type: ignore[arg-type]


def test_defaults_of_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Red when generation_config.json is honoured by the server alone, or beats what is given."""
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    args: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "kv_cache_memory": 1 << 20}
    (folder / "generation_config.json").write_text('{"temperature": 1e-6, "top_k": 7}')
    llm = LLM(str(folder), **args)
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens) == (1e-6, 7, 16)
    params.max_tokens = 8
    assert llm.get_default_sampling_params().max_tokens == 16, "each call gets its own"
    ids = llm.generate(PROMPTS[0], params, False)[0].outputs[0].token_ids
    assert llm.generate(PROMPTS[0], None, False)[0].outputs[0].token_ids[:8] == ids, "greedy"
    assert [t for e in llm.stream(PROMPTS[0]) for t in e.token_ids][:8] == ids
    given = llm.generate(PROMPTS[0], SamplingParams(seed=1), False)[0].outputs[0].token_ids
    assert given[:8] != ids, "explicit params are taken as they are"
    for plain in ("vllm", "none", None):
        assert LLM(str(folder), generation_config=plain, **args).get_default_sampling_params() == (
            SamplingParams()
        )
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(NotSupported, match=r"generation_config=.*want 'auto', 'none' or a folder"):
        LLM(str(folder), generation_config=str(other), **args)
    (other / "generation_config.json").write_text('{"top_p": 0.5}')
    own = LLM(str(folder), generation_config=str(other), **args)
    assert own.get_default_sampling_params() == SamplingParams(top_p=0.5)


def test_prompts_as_dicts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    text, tokens = TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids)
    first, second = llm.generate([text, tokens], GREEDY, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    picture = {"prompt": "What is this?", "multi_modal_data": {"image": object()}}
    with pytest.raises(BadRequest, match="'multi_modal_data': only text"):
        llm.generate(picture, GREEDY)


def test_chat(llm: LLM) -> None:
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "the fox"},
    ]
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert one.prompt.endswith("user: the fox\nassistant:") and one.outputs[0].token_ids
    several = llm.chat([conversation] * 3, sampling_params=GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in several] == [one.outputs[0].token_ids] * 3
    template = "{{ messages[-1].content }}{{ mood }}{% if add_generation_prompt %}>{% endif %}"
    (own,) = llm.chat(
        conversation,
        GREEDY,
        False,
        chat_template=template,
        chat_template_kwargs={"mood": "!"},
    )
    assert own.prompt == "the fox!>"


def test_chat_goes_on_with_the_last_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, the"}]
    wanted = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False, **wanted)
    assert output.prompt == "<s>user: hi\n<s>assistant: well, the"
    with pytest.raises(BadRequest, match="needs add_generation_prompt=False"):
        llm.chat(messages, GREEDY, continue_final_message=True)


def test_chat_by_the_server_s_rules(llm: LLM) -> None:
    """Red when a role the template does not know reaches it, or tools are dropped in silence."""
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "<s>system: Be brief.\n<s>user: Rain?\nassistant:"
    events = list(llm.stream_chat(messages, GREEDY))
    assert [t for e in events for t in e.token_ids] == output.outputs[0].token_ids
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    short = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=-1)
    (output,) = llm.chat(messages, short, use_tqdm=False, tools=[tool])
    assert '"name": "weather"' in output.prompt, "this template prints no tools: we write them out"
    picture = {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}
    with pytest.raises(BadRequest, match="only text"):
        llm.chat([{"role": "user", "content": [picture]}], GREEDY)
    with pytest.raises(BadRequest, match="arguments of their own"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"tokenize": True})


def test_a_template_applied_by_hand(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "the fox"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    (made,) = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    assert made.outputs[0].token_ids == chat.outputs[0].token_ids


def test_a_loop_that_changes_one_field(llm: LLM) -> None:
    """Red when params cannot be assigned to, or a change reaches a request that runs."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    lengths = []
    for count in (2, 5):
        params.max_tokens = count
        lengths.append(len(llm.generate(PROMPTS[0], params, False)[0].outputs[0].token_ids))
    assert lengths == [2, 5]
    stream = llm.stream(PROMPTS[0], params)
    first = next(stream)
    params.max_tokens = 1
    assert len(first.token_ids + [t for e in stream for t in e.token_ids]) == 5
    params.top_p = 7.0
    with pytest.raises(BadRequest, match="top_p"):
        llm.generate(PROMPTS[0], params)


def test_logprobs_stops_and_seeds(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=6, logprobs=2, prompt_logprobs=1)
    (first,), (again,) = (llm.generate(PROMPTS[0], params, False) for _ in range(2))
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    for token, position in zip(first.outputs[0].token_ids, first.outputs[0].logprobs, strict=True):
        assert position[token].logprob <= 0.0 and position[token].decoded_token is not None
    assert first.prompt_logprobs[0] is None
    text = llm.generate(PROMPTS[0], GREEDY, False)[0].outputs[0].text
    stopped = GREEDY.clone()
    stopped.stop = [text[2:4]]
    (output,) = llm.generate(PROMPTS[0], stopped, False)
    assert output.outputs[0].text == text[: text.index(text[2:4])]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", text[2:4])


def test_long_prompts_are_cut(llm: LLM) -> None:
    """Red when the beginning is kept instead of the end, or a long prompt is refused."""
    ids = [5 + i % 50 for i in range(400)]
    for count, kept in ((3, 3), (-1, 127)):
        params = SamplingParams(max_tokens=1, truncate_prompt_tokens=count)
        (output,) = llm.generate({"prompt_token_ids": ids}, params, False)
        assert output.prompt_token_ids == ids[-kept:]


def test_structured_outputs(llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    params = SamplingParams(structured_outputs=choice, max_tokens=32)
    assert llm.generate("Is it good?", params, False)[0].outputs[0].text in ("Positive", "Negative")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    params.structured_outputs = StructuredOutputsParams(json=schema)
    blanks = llm.get_tokenizer().encode(" \n\t\r", add_special_tokens=False)
    params.logit_bias = dict.fromkeys(blanks, -100.0)  # a random model would go on with them
    assert set(json.loads(llm.generate("JSON:", params, False)[0].outputs[0].text)) == {"a"}


def test_prefix_caching(make_llm: Callable[..., LLM]) -> None:
    prefix = "the quick brown fox jumps over the lazy dog " * 2
    prompts = [prefix + p for p in PROMPTS]
    plain = make_llm(enable_prefix_caching=False, block_size=8, page_size=None)
    cached = make_llm(enable_prefix_caching=True, block_size=8, page_size=None)
    assert plain.args.page_size == cached.args.page_size == 8
    want = plain.generate(prompts, GREEDY, use_tqdm=False)
    cached.generate(prompts[0], GREEDY, use_tqdm=False)
    found = cached.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in want]
    assert all(o.num_cached_tokens >= 8 for o in found)
    assert all(o.num_cached_tokens == 0 for o in want)


def test_embed_encode_and_score(llm: LLM) -> None:
    vectors = [o.outputs.embedding for o in llm.embed(PROMPTS, pooling_params=None, use_tqdm=False)]
    assert [o.outputs.data for o in llm.encode(PROMPTS, use_tqdm=False)] == vectors
    (same,) = llm.encode(PROMPTS[0], None, pooling_task="embed", use_tqdm=False)
    assert isinstance(same, quire.PoolingRequestOutput) and same.outputs.data == vectors[0]
    scores = llm.score(PROMPTS[0], PROMPTS, use_tqdm=False)
    assert scores[0].outputs.score == pytest.approx(1.0)
    with pytest.raises(BadRequest, match=r"pooling_task='token_embed'.*one vector for each"):
        llm.encode(PROMPTS, pooling_task="token_embed")
    with pytest.raises(BadRequest, match="pooling_params=5, want None"):
        llm.embed(PROMPTS, pooling_params=5)  # type: ignore[arg-type]
    with pytest.raises(NotSupported, match="needs a model with a classification head"):
        llm.encode(PROMPTS, pooling_task="classify")


def test_classify_and_encode_with_a_head(tmp_path: Path) -> None:
    from quire.models.tiny import tiny_model

    folder = tiny_model("Qwen3ForSequenceClassification", tmp_path, seed=2)
    llm = LLM(str(folder), runner="pooling", device="cpu", kv_cache_memory=1 << 22)
    outputs = llm.classify(PROMPTS, use_tqdm=False)
    assert all(sum(o.outputs.probs) == pytest.approx(1.0) for o in outputs)
    numbers = [torch.tensor(o.outputs.data) for o in llm.encode(PROMPTS, use_tqdm=False)]
    probs = [torch.tensor(o.outputs.probs) for o in outputs]
    assert torch.allclose(torch.stack(numbers).softmax(-1), torch.stack(probs))


@pytest.mark.parametrize("weights", ["float32"], indirect=True)
def test_what_the_engine_is_asked(llm: LLM) -> None:
    config = llm.llm_engine.model_config
    assert config is not None and config == llm.llm_engine.get_model_config()
    assert (config.max_model_len, config.dtype) == (128, torch.float32)
    assert config.get_vocab_size() == random_llama().config.vocab_size
    assert config.get_hidden_size() == 48
    assert llm.llm_engine.get_tokenizer() is llm.get_tokenizer() is llm.llm_engine.tokenizer


# ------------------------------------------------------------ arguments


@pytest.mark.parametrize("weights", ["float32"], indirect=True)
def test_arguments_that_change_nothing(make_llm: Callable[..., LLM], llm: LLM) -> None:
    """Red when a script fails over an argument it gives the value it has anyway."""
    same = make_llm(
        max_num_seqs=16,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        quantization=None,
        max_seq_len_to_capture=8192,
        cpu_offload_gb=0,
        swap_space=4,
        task="generate",
        runner="auto",
        download_dir=None,
        kv_cache_dtype="auto",
        enable_lora=True,
        generation_config="auto",
        trust_remote_code=False,
        disable_log_stats=True,
        tokenizer_mode="auto",
        revision=None,
        seed=0,
        enable_prefix_caching=None,
    )
    assert same.args == llm.args


@pytest.mark.parametrize(
    ("name", "value", "way_out"),
    [
        ("distributed_executor_backend", "ray", "one engine for each device"),
        ("cpu_offload_gb", 4, "a smaller or a quantized model"),
        ("task", "transcription", "call what you need"),
        ("runner", "draft", "generate or pool"),
        ("download_dir", "models", "QUIRE_CACHE"),
        ("calculate_kv_scales", True, "fp8_per_token_head"),
        ("revision", "main", "name@revision"),
    ],
)
def test_arguments_that_cannot_be_had(name: str, value: Any, way_out: str) -> None:
    """Red when something a script counts on is ignored, or refused without a way out."""
    with pytest.raises(NotSupported, match=f"got {name}=.*want .*{way_out}"):
        LLM("no-such-model", **{name: value})


def test_every_refusal_has_a_reason() -> None:
    assert all(u.otherwise for u in UNNEEDED.values() if u.harmless is not None)


def test_a_page_has_one_size() -> None:
    """Red when one of two names for the same thing wins in silence."""
    with pytest.raises(NotSupported, match=r"block_size and page_size.*give one"):
        LLM("no-such-model", block_size=8, page_size=16)


# ------------------------------------------------------------ beam search


def sums(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("weights", ["float32"], indirect=True)
def test_beams_equal_transformers(llm: LLM) -> None:
    """Red when a beam is lost, misjudged or out of order."""
    model = random_llama()
    params = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)
    outputs = llm.beam_search([{"prompt": p} for p in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        want = model.generate(
            torch.tensor([ids]),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=6,
            min_new_tokens=6,
            eos_token_id=-1,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [beam.tokens for beam in output.sequences] == want.sequences.tolist()
        scores = [beam.cum_logprob / 6 for beam in output.sequences]
        assert scores == pytest.approx(want.sequences_scores.tolist(), abs=1e-4)
        for beam in output.sequences:
            assert beam.text == llm.get_tokenizer().decode(beam.tokens)
            assert beam.finish_reason == "length" and len(beam.logprobs) == 6


@pytest.mark.parametrize("weights", ["float32"], indirect=True)
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_that_end(llm: LLM, length_penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a search over the whole vocabulary, written out: red when an end is missed, grows on,
    or lengths are weighed otherwise than in vLLM."""
    model, width, depth = random_llama(), 8, 4
    ids = llm.get_tokenizer().encode("the quick brown fox")
    end = llm.generate(ids, GREEDY, False)[0].outputs[0].token_ids[2]  # a token beams do find
    monkeypatch.setattr(llm._intake, "eos_ids", frozenset({end}))
    growing, ended = [(0.0, ids)], []
    for _ in range(depth):
        longer = []
        for total, tokens in growing:
            found = sums(model, tokens)
            for token in found.topk(2 * width).indices.tolist():
                grown = (total + found[token].item(), [*tokens, token])
                (ended if token == end else longer).append(grown)
        growing = sorted(longer, reverse=True)[:width]
    assert ended, "no beam ends here: choose another token"

    def score(beam: tuple[float, list[int]]) -> float:
        return beam[0] / (len(beam[1]) - (beam[1][-1] == end)) ** length_penalty

    want = sorted([*ended, *growing], key=score, reverse=True)[:width]
    params = BeamSearchParams(beam_width=width, max_tokens=depth, length_penalty=length_penalty)
    (output,) = llm.beam_search(["the quick brown fox"], params)
    assert [beam.tokens for beam in output.sequences] == [tokens for _, tokens in want]
    sums_found = [beam.cum_logprob for beam in output.sequences]
    assert sums_found == pytest.approx([total for total, _ in want], abs=1e-4)
    ends = [beam.finish_reason == "stop" for beam in output.sequences]
    assert ends == [tokens[-1] == end for _, tokens in want]
    assert any(ends) == (length_penalty < 2.0), "a higher one favours those that go on"


def test_beams_stop_at_the_end_of_the_context(llm: LLM) -> None:
    """Red when a search that fills the context is refused in the middle."""
    params = BeamSearchParams(beam_width=2, max_tokens=9, ignore_eos=True)
    prompts = [[BOS] + [7] * 124, [BOS, 8, 9]]
    long, short = llm.beam_search(prompts, params, concurrency_limit=2)
    assert [len(beam.tokens) for beam in long.sequences] == [128, 128]
    assert [len(beam.tokens) for beam in short.sequences] == [12, 12]
    alone = llm.beam_search(prompts, params, concurrency_limit=1)
    assert [b.tokens for o in alone for b in o.sequences] == [
        b.tokens for o in (long, short) for b in o.sequences
    ]
