"""quire generate: prompts from the command line or stdin, answers on stdout."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from quire.cli.engine_flags import add_engine_flags, add_model, checked_args, model_of, open_llm
from quire.cli.parser import VerbParser, positive
from quire.cli.show import note, print_json
from quire.errors import BadRequest, EngineDead

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.outputs import CompletionOutput, RequestOutput, StreamEvent
    from quire.params import SamplingParams

EXAMPLES = """
quire generate 'The capital of France is'
quire generate --chat 'Why is the sky blue?' --max-tokens 200
quire generate --temperature 0.8 --n 3 'Once upon a time'
cat letter.txt | quire generate --chat
quire generate --json 'one prompt' 'another' | jq .outputs[0].text
"""


def build_parser() -> VerbParser:
    parser = VerbParser(
        "generate",
        "Continue prompts; several run as one batch. No prompt or '-': stdin.",
        EXAMPLES,
        "[PROMPT ...]",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; '-' for stdin")
    add_model(parser, positional=False)
    parser.flag("--chat", "answer as a chat message", action="store_true")
    parser.flag("--ids", "prompts are token ids such as '5 6 7'", action="store_true")
    parser.flag("--json", "one JSON object per prompt", action="store_true")
    add_sampling_flags(parser, max_tokens=128, temperature=0.0)
    parser.flag("--n", "answers per prompt", type=positive, default=1, metavar="N")
    parser.flag("--logprobs", "with the N likeliest tokens of each position", type=int, metavar="N")
    parser.flag("--ignore-eos", "go on to --max-tokens", action="store_true")
    add_engine_flags(parser)
    return parser


def add_sampling_flags(parser: VerbParser, max_tokens: int, temperature: float) -> None:
    flag = parser.flag
    flag("--max-tokens", "longest answer", type=positive, default=max_tokens, metavar="N")
    usual = f"0: always the likeliest (default: as the model's makers recommend, or {temperature})"
    flag("--temperature", usual, type=float, metavar="X")
    parser.set_defaults(usual_temperature=temperature)
    flag("--top-p", "keep tokens up to this probability mass", type=float, metavar="X")
    flag("--top-k", "keep this many tokens", type=int, metavar="N")
    flag("--min-p", "drop tokens below this share of the best", type=float, metavar="X")
    flag("--stop", "end at this text (may be repeated)", action="append", metavar="TEXT")


def sampling_params(args: Namespace, **more: Any) -> SamplingParams:
    """As asked for; what was not said is as the model's makers recommend."""
    from quire.cli.download import fetch
    from quire.load.recommended import recommended_sampling
    from quire.params import SamplingParams

    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    asked = SamplingParams(**given, **more)  # mistakes first, before anything is downloaded
    checked_args(args)
    recommended = recommended_sampling(model_of(args), fetch(model_of(args)))
    usual = {"temperature": args.usual_temperature, **recommended}
    return asked.with_(**{name: usual[name] for name in usual if name not in given})


def run(args: Namespace) -> int:
    if args.chat and args.ids:
        raise BadRequest("--chat needs text, --ids gives token ids; use one of them")
    texts = read_prompts(args.prompts)
    params = sampling_params(
        args, n=args.n, logprobs=args.logprobs, ignore_eos=args.ignore_eos, seed=args.engine_seed
    )
    prompts: list[Any] = [_parse_ids(text) for text in texts] if args.ids else list(texts)
    llm = open_llm(args, skip_tokenizer_init=args.ids, seed=args.engine_seed)
    if args.chat:
        prompts = [_as_chat(llm, text) for text in texts]
    is_plain = len(prompts) == 1 and args.n == 1 and args.logprobs is None and not args.json
    if is_plain and sys.stdout.isatty():
        _stream(llm, prompts[0], params)
        return 0
    outputs = llm.generate(prompts, params)
    for text, output in zip(texts, outputs, strict=True):
        if args.json:
            print_json(as_record(output))
        else:
            _print_output(text, output, is_plain, has_text=llm.tokenizer is not None)
    for answer in (answer for output in outputs for answer in output.outputs):
        _check_end(answer)
    return 0


def read_stdin() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise BadRequest(f"stdin is not UTF-8 text ({error.reason})") from None


def read_prompts(words: list[str]) -> list[str]:
    """Words are prompts; '-' and nothing at all mean stdin."""
    if not words and sys.stdin.isatty():
        raise BadRequest("no prompt: give one in quotes, or pipe a text in")
    prompts = [read_stdin() if word == "-" else word for word in words or ["-"]]
    if any(not prompt for prompt in prompts):
        raise BadRequest("got an empty prompt")
    return prompts


def _parse_ids(text: str) -> dict[str, Any]:
    try:
        return {"prompt_token_ids": [int(word) for word in text.replace(",", " ").split()]}
    except ValueError:
        raise BadRequest(f"got --ids {text[:80]!r}, want whole numbers such as '5 6 7'") from None


def _as_chat(llm: LLM, text: str) -> dict[str, Any]:
    tokenizer = llm.get_tokenizer()
    turns = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return {"prompt": prompt, "prompt_token_ids": tokenizer.encode(prompt, False)}


def _stream(llm: LLM, prompt: Any, params: SamplingParams) -> None:
    for event in llm.stream(prompt, params):
        shown = event.text if llm.tokenizer else "".join(f"{id} " for id in event.token_ids)
        print(shown, end="", flush=True)
        _check_end(event)
    print()


def _check_end(end: CompletionOutput | StreamEvent) -> None:
    if end.finish_reason == "error":
        raise EngineDead(f"an answer was cut short: {end.stop_reason}")


def _print_output(text: str, output: RequestOutput, is_plain: bool, has_text: bool) -> None:
    for answer in output.outputs:
        shown = answer.text if has_text else " ".join(map(str, answer.token_ids))
        if not is_plain:
            number = f" [{answer.index + 1}]" if len(output.outputs) > 1 else ""
            head = " ".join(text.split())
            print(f"> {head[:70]}{'...' if len(head) > 70 else ''}{number}")
        print(shown)
        for position in answer.logprobs or ():
            print(
                "  " + "  ".join(f"{p.decoded_token!r} {p.logprob:.3f}" for p in position.values())
            )
    if not is_plain and output.metrics and output.metrics.num_preemptions:
        note(f"preempted {output.metrics.num_preemptions} times: the cache is small")


def as_record(output: RequestOutput) -> dict[str, Any]:
    """A RequestOutput as plain JSON values."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_answer_record(answer) for answer in output.outputs],
        "num_cached_tokens": output.num_cached_tokens,
        "metrics": _metrics_record(output),
    }


def _answer_record(answer: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        record["cumulative_logprob"] = answer.cumulative_logprob
        record["logprobs"] = [
            [
                {"id": id, "token": p.decoded_token, "logprob": p.logprob, "rank": p.rank}
                for id, p in position.items()
            ]
            for position in answer.logprobs
        ]
    return record


def _metrics_record(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    if metrics is None or metrics.last_token_time is None or metrics.ttft is None:
        return {}
    total = metrics.last_token_time - metrics.arrival_time
    num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
    return {
        "queue_s": metrics.queue_time,
        "ttft_s": metrics.ttft,
        "total_s": total,
        "tokens_per_s": num_tokens / total if total > 0 else None,
        "num_preemptions": metrics.num_preemptions,
    }
