"""OutputRouter: one completion's text in, its reasoning, content and calls out, in order.

Reasoning is taken off first and only the rest is searched for calls: a call the model merely thinks
about is not one. Either half may be missing; with neither, everything is text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from quire.text.reasoning import Piece, Reasoning, ReasoningSplitter
from quire.text.tools.parser import Part, TextPart, ToolParser


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    text: str


RoutedPart: TypeAlias = Part | ReasoningPart


class OutputRouter:
    """
    >>> router = OutputRouter(ReasoningSplitter("<think>", "</think>", inside=True), None)
    >>> router.push("hm</think>Yes")
    [ReasoningPart(text='hm'), TextPart(text='Yes')]
    """

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[RoutedPart]:
        if self._reasoning is None:
            return [*self._content(text)]
        return self._route(self._reasoning.push(text))

    def finish(self) -> list[RoutedPart]:
        """What was held back; call once, at the end."""
        parts = self._route(self._reasoning.finish()) if self._reasoning is not None else []
        return [*parts, *self._tools.finish()] if self._tools is not None else parts

    def _route(self, pieces: Iterable[Piece]) -> list[RoutedPart]:
        parts: list[RoutedPart] = []
        for piece in pieces:
            if isinstance(piece, Reasoning):
                parts.append(ReasoningPart(piece.text))
            else:
                parts += self._content(piece.text)
        return parts

    def _content(self, text: str) -> Iterable[Part]:
        if self._tools is not None:
            return self._tools.push(text)
        return [TextPart(text)] if text else []
