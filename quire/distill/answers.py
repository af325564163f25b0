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

from quire.distill.prompts import built_in, read_prompts
from quire.distill.recipe import Corpus
from quire.errors import QuireError
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

ROUND = 64  # answers asked for at once
MAX_PROMPT = 1024  # tokens; of longer prompts the end is left out


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
    """All answers; the engine is only made where some are missing."""
    found = list(_read(path))[: corpus.answers]
    _rewrite(path, found)
    if len(found) < corpus.answers:
        prompts = prompts_of(corpus)
        llm = make_llm()
        while len(found) < corpus.answers:
            listen(len(found), corpus.answers)
            last = min(len(found) + ROUND, corpus.answers)
            fresh = _ask(llm, prompts, range(len(found), last), corpus)
            _append(path, fresh)
            found += fresh
    listen(len(found), corpus.answers)
    return found


def _ask(llm: LLM, prompts: Sequence[str], numbers: range, corpus: Corpus) -> list[Answer]:
    inputs: list[Any] = [_prompt(llm, prompts[i % len(prompts)]) for i in numbers]
    params = [
        SamplingParams(
            temperature=corpus.temperatures[i % len(corpus.temperatures)],
            max_tokens=corpus.tokens,
            min_tokens=1,
            seed=corpus.seed + i,
        )
        for i in numbers
    ]
    made = []
    for output in llm.generate(inputs, params, use_tqdm=False):
        (completion,) = output.outputs
        if completion.finish_reason == "error":
            raise QuireError(f"the target failed on a prompt: {completion.stop_reason}")
        ids = output.prompt_token_ids
        made.append(Answer(list(ids), list(completion.token_ids)))
    return made


def _prompt(llm: LLM, text: str) -> dict[str, Any]:
    """As a conversation where the model has a template."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(text)
    else:
        from quire.offline.chat_prompt import ChatStyle

        messages = [{"role": "user", "content": text}]
        ids = ChatStyle.of().prompt(tokenizer, messages)["prompt_token_ids"]
    return {"prompt_token_ids": ids[:MAX_PROMPT]}


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


def _rewrite(path: Path, answers: Sequence[Answer]) -> None:
    """Without a line that was cut off: what is appended begins a line of its own."""
    beside = path.with_name(path.name + ".unfinished")
    beside.write_bytes(b"".join(map(_line, answers)))
    beside.replace(path)


def _append(path: Path, answers: Sequence[Answer]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(map(_line, answers)))
        file.flush()
        os.fsync(file.fileno())


def _line(answer: Answer) -> bytes:
    return json.dumps([answer.prompt, answer.answer]).encode() + b"\n"
