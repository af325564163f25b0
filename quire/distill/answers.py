"""Answers: what the target writes to the prompts, by our own engine, kept on disk.

One JSON line an answer. A line is whole or, where the process died, dropped; the next run goes on
with the answers that are missing. Seeds follow from the number of the answer, so they are the same
answers whenever they are made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.distill.free_text import FreeText
from quire.distill.prompts import built_in, read_prompts
from quire.distill.recipe import Corpus
from quire.errors import QuireError
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

ROUND = {"cpu": 64}  # answers asked for at once: what a kill may cost ...
ROUND_ELSEWHERE = 2048  # ... and how seldom an engine runs dry
MAX_PROMPT = 1024  # tokens; of longer prompts the end is left out


class Prompt(NamedTuple):
    ids: list[int]
    goes_on: bool = False  # past what would end an answer, to its full length


class Answer(NamedTuple):
    prompt: list[int]
    answer: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.answer


def prompts_of(corpus: Corpus) -> list[str]:
    return built_in() if corpus.prompts is None else read_prompts(Path(corpus.prompts))


def collect(
    path: Path,
    corpus: Corpus,
    make_llm: Callable[[], LLM],
    listen: Callable[[int, int], None],
) -> list[Answer]:
    """The target's answers to all prompts; the engine is only made where some are missing."""

    def prompts(llm: LLM) -> Callable[[int], Prompt]:
        texts = prompts_of(corpus)
        free = FreeText.of(llm.get_tokenizer(), corpus) if corpus.free_share else None

        def prompt(number: int) -> Prompt:
            if free is not None and free.has(number):
                return Prompt(free.begin(number), goes_on=True)
            return Prompt(_prompt(llm, texts[number % len(texts)]))

        return prompt

    return _complete(path, corpus, corpus.answers, (make_llm, prompts), listen)


def ask_again(
    path: Path, corpus: Corpus, prompts: Sequence[list[int]], make_llm: Callable[[], LLM]
) -> list[Answer]:
    """Another model's answers to prompts that are tokens already."""
    asks = make_llm, lambda llm: lambda number: Prompt(prompts[number])
    return _complete(path, corpus, len(prompts), asks, lambda done, total: None)


Asks = tuple[Callable[[], "LLM"], Callable[["LLM"], Callable[[int], Prompt]]]


def _complete(
    path: Path, corpus: Corpus, count: int, asks: Asks, listen: Callable[[int, int], None]
) -> list[Answer]:
    found = list(_read(path))[:count]
    if not _holds_just(path, len(found)):
        _rewrite(path, found)
    if len(found) < count:
        make_llm, prompts = asks
        llm = make_llm()
        prompt_of = prompts(llm)
        while len(found) < count:
            listen(len(found), count)
            at_once = ROUND.get(llm._engine.config.device, ROUND_ELSEWHERE)
            numbers = range(len(found), min(len(found) + at_once, count))
            fresh = _ask(llm, [prompt_of(i) for i in numbers], numbers, corpus)
            _append(path, fresh)
            found += fresh
    listen(len(found), count)
    return found


def _ask(llm: LLM, prompts: Sequence[Prompt], numbers: range, corpus: Corpus) -> list[Answer]:
    inputs: list[Any] = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
    params = [
        SamplingParams(
            temperature=corpus.temperatures[i % len(corpus.temperatures)],
            max_tokens=corpus.tokens,
            min_tokens=1,
            seed=corpus.seed + i,
            ignore_eos=prompt.goes_on,
            detokenize=False,
        )
        for i, prompt in zip(numbers, prompts, strict=True)
    ]
    made = []
    for output in llm.generate(inputs, params, use_tqdm=False):
        (completion,) = output.outputs
        if completion.finish_reason == "error":
            raise QuireError(f"the model failed on a prompt: {completion.stop_reason}")
        made.append(Answer(list(output.prompt_token_ids), list(completion.token_ids)))
    return made


def _prompt(llm: LLM, text: str) -> list[int]:
    """As a conversation where the model has a template."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(text)
    else:
        from quire.offline.chat_prompt import ChatStyle

        messages = [{"role": "user", "content": text}]
        ids = ChatStyle.of().prompt(tokenizer, messages)["prompt_token_ids"]
    return ids[:MAX_PROMPT]


def _read(path: Path) -> Iterator[Answer]:
    """Up to the first line that is not whole."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            prompt, answer = json.loads(line)
        except ValueError:
            return
        yield Answer(prompt, answer)


def _holds_just(path: Path, count: int) -> bool:
    """Whole lines, and so many."""
    data = path.read_bytes() if path.exists() else b""
    return data.count(b"\n") == count and data.endswith(b"\n")


def _rewrite(path: Path, answers: Sequence[Answer]) -> None:
    """Without a line that was cut off: what is appended begins a line of its own."""
    beside = path.with_name(path.name + ".unfinished")
    beside.write_bytes(b"".join(map(_line, answers)))
    beside.replace(path)


def _append(path: Path, answers: Sequence[Answer]) -> None:
    try:
        with path.open("ab") as file:
            file.write(b"".join(map(_line, answers)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise QuireError(
            f"cannot write {path}: {error.strerror}; make room and run the same command again: it"
            " goes on with the answers that are missing"
        ) from error


def _line(answer: Answer) -> bytes:
    return json.dumps([answer.prompt, answer.answer]).encode() + b"\n"
