"""What a parser made of an output, in a form that does not depend on how the output was cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from quire.text.tools.forced import ForcedCallParser
from quire.text.tools.formats import tool_parser
from quire.text.tools.parser import CallArguments, CallCut, CallStart, TextPart

FORMATS: dict[str, Callable[[], Any]] = {
    name: partial(tool_parser, name) for name in ("hermes", "llama3_json", "mistral", "pythonic")
} | {"forced": ForcedCallParser}


class Reader(Protocol):
    def push(self, text: str) -> Sequence[object]: ...

    def finish(self) -> Sequence[object]: ...


@dataclass
class Call:
    name: str
    arguments: str = ""
    closing: str | None = None  # None unless cut


@dataclass
class Reading:
    order: list[Any] = field(default_factory=list)  # texts, joined, and the indices of calls
    calls: list[Call] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(entry for entry in self.order if isinstance(entry, str))

    def plain(self) -> tuple[str, list[tuple[str, Any]]]:
        """(content, [(name, parsed arguments)])."""
        return self.text, [(call.name, json.loads(call.arguments)) for call in self.calls]


def read(parser: Reader, pieces: Iterable[str]) -> Reading:
    reading = Reading()
    ids: set[str] = set()
    parts = [part for piece in pieces for part in parser.push(piece)] + [*parser.finish()]
    for part in parts:
        if isinstance(part, TextPart):
            assert part.text, "an empty part says nothing"
            if reading.order and isinstance(reading.order[-1], str):
                reading.order[-1] += part.text
            else:
                reading.order.append(part.text)
        elif isinstance(part, CallStart):
            assert part.index == len(reading.calls) and part.id not in ids
            ids.add(part.id)
            reading.order.append(part.index)
            reading.calls.append(Call(part.name))
        elif isinstance(part, CallArguments):
            assert part.index == len(reading.calls) - 1 and part.delta
            assert reading.order[-1] == part.index, "arguments after something else was begun"
            assert reading.calls[-1].closing is None
            reading.calls[-1].arguments += part.delta
        else:
            assert isinstance(part, CallCut)
            assert part.index == len(reading.calls) - 1 and reading.calls[-1].closing is None
            reading.calls[-1].closing = part.closing
    for call in reading.calls:
        assert isinstance(json.loads(call.arguments + (call.closing or "")), dict)
    return reading


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def chunkings(text: str) -> list[list[str]]:
    """Every way to cut once, and cuts of all small sizes."""
    return [[text], *(cut(text, n) for n in range(1, 9))] + [
        [text[:i], "", text[i:]] for i in range(1, len(text))
    ]
