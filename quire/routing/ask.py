"""Ask: a request as routing sees it, whichever API it came by.

Chat, plain completions, Responses, Messages and Ollama's bodies have their texts in different
places. This reads them all into one value, forgivingly: what is wrong with a body is its handler's
to say. `features.py` and `rules.py` read nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

IMAGES = frozenset(("image", "image_url", "input_image"))
TEXTS = frozenset(("text", "input_text", "output_text"))
SCHEMAS = ("response_format", "structured_outputs", "guided_json", "format")


class Ask(NamedTuple):
    text: str  # the last message of the user, or the prompt
    context: str = ""  # everything before it: other messages, instructions
    num_messages: int = 1
    num_tools: int = 0
    num_images: int = 0
    num_prompts: int = 1  # of a plain completion
    has_schema: bool = False


def read_ask(body: Mapping[str, Any]) -> Ask:
    """
    >>> read_ask({"messages": [{"role": "user", "content": "Hi"}]}).text
    'Hi'
    >>> read_ask({"input": [{"type": "input_text", "text": "Hi"}], "tools": [{}]}).num_tools
    1
    """
    before = [_text(body.get(name)) for name in ("system", "instructions")]
    turns = body.get("messages", body.get("input", body.get("prompt")))
    num_prompts = 1
    if isinstance(turns, list) and "messages" not in body and "input" not in body:
        is_ids = all(isinstance(one, int) for one in turns)
        num_prompts = 1 if is_ids else len(turns)
    texts = [_text(turn) for turn in turns] if isinstance(turns, list) else [_text(turns)]
    last = _last_user(turns) if isinstance(turns, list) else len(texts) - 1
    around = [*before, *(text for at, text in enumerate(texts) if at != last)]
    tools = body.get("tools")
    return Ask(
        text=texts[last] if texts else "",
        context="\n".join(text for text in around if text),
        num_messages=len(texts),
        num_tools=len(tools) if isinstance(tools, list) else 0,
        num_images=_num_images(turns),
        num_prompts=num_prompts,
        has_schema=any(_is_schema(body.get(name)) for name in SCHEMAS),
    )


def _last_user(turns: list[Any]) -> int:
    for at in range(len(turns) - 1, -1, -1):
        if isinstance(turns[at], Mapping) and turns[at].get("role") == "user":
            return at
    return len(turns) - 1


def _text(turn: object) -> str:
    if isinstance(turn, str):
        return turn
    if isinstance(turn, list):
        return "\n".join(filter(None, map(_text, turn)))
    if isinstance(turn, Mapping):
        if turn.get("type", "text") in TEXTS and isinstance(turn.get("text"), str):
            return str(turn["text"])
        return _text(turn.get("content"))
    return ""


def _num_images(turns: object) -> int:
    return sum(
        part.get("type") in IMAGES for part in _parts(turns) if isinstance(part.get("type"), str)
    )


def _parts(turns: object) -> Iterable[Mapping[str, Any]]:
    """Objects in the input, and those in their content."""
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, Mapping):
            yield turn
            yield from _parts(turn.get("content"))


def _is_schema(value: object) -> bool:
    return bool(value) and value != {"type": "text"}
