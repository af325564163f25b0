"""Real weights, greedy: what Quire says beside what transformers says, token for token.

    python benchmarks/real_weights.py gemma-3-270m qwen2.5-coder-0.5b-instruct

For each model sixteen prompts run as one continuous batch with chunked prompts and prefix hits, in
fp32 on the CPU; some are longer than the windows of Gemma 3. transformers reads the same files by
itself (a GGUF with its own reader) and is fed our answers in one forward each: where its argmax is
our token at every position, its greedy generation is our answer, by induction; `generated_equal`
checks that argument with its own generate() on a short and a long prompt. One JSON line per model.
A difference is listed with the gap between the oracle's two best logits: below 1e-4 it is a tie of
rounding. The exit status is 1 when another difference was found.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.config import EngineArgs
from quire.load.hub import resolve_model
from quire.load.open import open_model
from quire.models.registry import spec_of

TIE = 1e-4
CHUNK = 128  # tokens of a step: every long prompt takes several
ROWS = 8  # half the prompts wait for a row, and find the pages of those before them
NEEDS_WINDOW = 600  # tokens; Gemma 3's smallest window is 512
LONG_TEXT = Path(__file__).parents[1] / "docs" / "tour.md"

QUESTIONS = (
    "What is the capital of Norway?",
    "Write a Python function that reverses a string.",
    "Explain photosynthesis to a child of ten.",
    "What is 17 times 23?",
    "Why is the sky blue?",
)
TEXTS = (
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "Ingredients:\n- 200 g flour\n-",
    "A",
    "La révolution française",
    '{"name": "Ada", "born":',
)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a prompt on which the two disagree."""

    prompt: int
    token: int  # of the answer, from 0
    ours: int
    theirs: int
    margin: float  # between the two best logits of transformers
    is_tie: bool


def prompts_of(llm: LLM, max_tokens: int) -> list[Any]:
    """Sixteen: five questions, seven texts, and four long ones that share a beginning."""
    tokenizer = llm.get_tokenizer()

    def ask(question: str) -> Any:
        if tokenizer.chat_template is None:
            return f"Q: {question}\nA:"
        turn = [{"role": "user", "content": question}]
        return {"prompt_token_ids": tokenizer.apply_chat_template(turn, add_generation_prompt=True)}

    long = tokenizer.encode(LONG_TEXT.read_text(encoding="utf-8"))
    top = min(900, max_tokens)
    ends = (top, top - 50, top * 3 // 4, top // 3)
    return [
        *(ask(question) for question in QUESTIONS),
        *TEXTS,
        *({"prompt_token_ids": long[:end]} for end in ends),
    ]


@dataclass(frozen=True, slots=True)
class Run:
    outputs: list[RequestOutput]
    again: RequestOutput  # the longest prompt a second time
    steps: int
    hit_tokens: int
    seconds: float


def run_quire(path: Path, num_tokens: int, num_threads: int) -> Run:
    opened = open_model(EngineArgs(model=str(path), skip_tokenizer_init=True))
    max_len = min(spec_of(opened.checkpoint.config).max_positions, 1024)
    llm = LLM(
        str(path),
        device="cpu",
        dtype="float32",
        max_model_len=max_len,
        max_num_seqs=ROWS,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory=1 << 30,
        num_threads=num_threads,
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    some = prompts_of(llm, max_len - num_tokens)
    start = time.perf_counter()
    outputs = llm.generate(some, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    stats = llm.stats()
    longest = max(outputs, key=lambda output: len(output.prompt_token_ids))
    ids: Any = {"prompt_token_ids": longest.prompt_token_ids}
    (again,) = llm.generate([ids], params, use_tqdm=False)
    return Run(outputs, again, stats.num_steps, stats.prefix_hit_tokens, seconds)


def load_oracle(path: Path) -> Any:
    import transformers

    if path.suffix != ".gguf":
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def first_difference(oracle: Any, output: RequestOutput, prompt: int) -> Difference | None:
    answer = list(output.outputs[0].token_ids)
    tokens = torch.tensor([output.prompt_token_ids + answer[:-1]])
    logits = oracle(tokens, logits_to_keep=len(answer), use_cache=False).logits[0].float()
    best = logits.topk(2, dim=-1)
    for i, (ours, theirs) in enumerate(zip(answer, best.indices[:, 0].tolist(), strict=True)):
        if ours != theirs:
            margin = float(best.values[i, 0] - best.values[i, 1])
            return Difference(prompt, i, ours, theirs, margin, margin < TIE)
    return None


@torch.inference_mode()
def generates_the_same(oracle: Any, output: RequestOutput) -> bool:
    ids = torch.tensor([output.prompt_token_ids])
    answer = list(output.outputs[0].token_ids)
    made = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=len(answer),
        eos_token_id=None,
        pad_token_id=0,
    )
    return bool(made[0, ids.shape[1] :].tolist() == answer)


def compare(model: str, num_tokens: int, num_threads: int) -> dict[str, Any]:
    path = resolve_model(model)
    run = run_quire(path, num_tokens, num_threads)
    gc.collect()  # the weights, before they come a second time
    oracle = load_oracle(path)
    found = [first_difference(oracle, output, i) for i, output in enumerate(run.outputs)]
    differences = [difference for difference in found if difference is not None]
    lens = [len(output.prompt_token_ids) for output in run.outputs]
    longest = lens.index(max(lens))
    checked = [i for i in (len(QUESTIONS), longest) if found[i] is None]
    same_again = run.again.outputs[0].token_ids == run.outputs[longest].outputs[0].token_ids
    return {
        "model": model,
        "architecture": type(oracle).__name__,
        "window": getattr(oracle.config, "sliding_window", None),
        "prompts": len(run.outputs),
        "tokens_each": num_tokens,
        "equal_prompts": len(run.outputs) - len(differences),
        "ties": sum(difference.is_tie for difference in differences),
        "differences": [asdict(difference) for difference in differences],
        "generated_equal": all(generates_the_same(oracle, run.outputs[i]) for i in checked),
        "generated_checked": len(checked),
        "prompts_over_600": sum(n > NEEDS_WINDOW for n in lens),
        "longest_prompt": max(lens),
        "steps": run.steps,
        "prefix_hit_tokens": run.hit_tokens,
        "again_cached_tokens": run.again.num_cached_tokens,
        "again_same_tokens": bool(same_again),
        "seconds": round(run.seconds, 1),
        "text": run.outputs[len(QUESTIONS)].outputs[0].text,
        "answer": run.outputs[0].outputs[0].text,
    }


def is_good(result: dict[str, Any]) -> bool:
    return (
        bool(result["equal_prompts"] + result["ties"] == result["prompts"])
        and bool(result["generated_equal"] and result["again_same_tokens"])
        and bool(result["again_cached_tokens"] > 0)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", help="known names, folders or .gguf files")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    good = True
    for model in args.models:
        result = compare(model, args.tokens, args.threads)
        print(json.dumps(result), flush=True)
        good &= is_good(result)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
