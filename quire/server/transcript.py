"""Transcript: a conversation given in small items, put together as the messages templates expect.

Responses and Messages both tell thoughts, texts, calls and results one by one; a chat template
wants one assistant message that holds all of a turn. Texts arrive here as strings and calls with
their parts named; reading the items of either API is that API's business.
"""

from __future__ import annotations

from typing import Any


class Transcript:
    """
    >>> transcript = Transcript()
    >>> transcript.say("assistant", "Let me look.")
    >>> transcript.call("c1", "look", "{}")
    >>> [sorted(message) for message in transcript.messages]
    [['content', 'role', 'tool_calls']]
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thoughts: list[str] = []  # of the assistant's turn that follows

    def instruct(self, text: str) -> None:
        """A system message; several at the beginning become one, as templates allow only one."""
        last = self.messages[-1] if self.messages else None
        if last is not None and len(self.messages) == 1 and last["role"] == "system":
            last["content"] += f"\n\n{text}"
        else:
            self._add("system", text)

    def say(self, role: str, text: str) -> None:
        """A user's or the assistant's words; the latter's go on with the turn that is open."""
        if role != "assistant":
            self._add(role, text)
            return
        turn = self._turn()
        turn["content"] += f"\n{text}" if turn["content"] else text

    def think(self, text: str) -> None:
        if text:
            self._thoughts.append(text)

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._turn().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        self._add("tool", text)
        self.messages[-1]["tool_call_id"] = call_id

    def _turn(self) -> dict[str, Any]:
        """The assistant message being put together."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add("assistant", "")
        turn = self.messages[-1]
        if self._thoughts:
            turn["reasoning_content"] = "\n".join(self._thoughts)
            self._thoughts = []
        return turn

    def _add(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})
