"""Keys of a prompt's leading pages, made from a request's body before anybody has answered it.

With the model's tokenizer they are the keys that upstreams publish (`kv/route_keys.py`): the prompt
is rendered and tokenised here as it will be there. Without one, pages are pieces of the prompt's
text, good for upstreams that publish nothing. A prompt that is read otherwise than the upstream
reads it is a worse guess and never a wrong answer.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from quire.errors import QuireError
from quire.kv.route_keys import child_route_key, root_route_key
from quire.router.choose import Prompt
from quire.text.tokenizer import Tokenizer

TEXT_PAGE = 512  # bytes
BYTES_PER_TOKEN = 4
MOST_PAGES = 4_096
KEY_BYTES = 8


class PromptKeys(Protocol):
    def prompt_of(self, body: Mapping[str, Any], salt: str, page_size: int) -> Prompt:
        """`page_size`: tokens of a page where upstreams publish their caches, else 0."""
        ...


class TextKeys:
    """The prompt's own text in pieces, whatever the model."""

    def prompt_of(self, body: Mapping[str, Any], salt: str, page_size: int) -> Prompt:
        data = _text_of(body).encode("utf-8", "surrogatepass")
        key, keys = blake2b(f"{body.get('model')}/{salt}".encode(), digest_size=16).digest(), []
        for at in range(0, min(len(data), MOST_PAGES * TEXT_PAGE) - TEXT_PAGE + 1, TEXT_PAGE):
            key = blake2b(key + data[at : at + TEXT_PAGE], digest_size=16).digest()
            keys.append(key[:KEY_BYTES])
        return Prompt(len(data) // BYTES_PER_TOKEN + 1, TEXT_PAGE // BYTES_PER_TOKEN, keys)


def prompt_of_tokens(tokens: Sequence[int], salt: str, page_size: int) -> Prompt:
    """`page_size` 0: no upstream publishes its cache, and nothing is known of pages."""
    if not page_size:
        return Prompt(len(tokens))
    ids, keys = array("i", tokens), list[bytes]()
    key = root_route_key(salt)
    for at in range(0, min(len(ids), MOST_PAGES * page_size) - page_size + 1, page_size):
        key = child_route_key(key, ids[at : at + page_size].tobytes())
        keys.append(key)
    return Prompt(len(ids), page_size, keys)


class TokenKeys:
    """The tokens that an upstream of this model will see."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = TextKeys()

    def prompt_of(self, body: Mapping[str, Any], salt: str, page_size: int) -> Prompt:
        if not page_size:
            return self._text.prompt_of(body, salt, 0)
        try:
            tokens = array("i", self._tokens(body))
        except (QuireError, TypeError, ValueError, OverflowError):
            return Prompt()  # the upstream will say what is wrong with it
        return prompt_of_tokens(tokens, salt, page_size)

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        if isinstance(body.get("messages"), list):
            text = self._tokenizer.render_chat(body["messages"], tools=body.get("tools"))
            return self._tokenizer.encode(text, add_special_tokens=False)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, list):
            return [int(token) for token in prompt]
        if isinstance(prompt, str):
            special = body.get("add_special_tokens") is not False
            return self._tokenizer.encode(prompt, add_special_tokens=special)
        return self._tokenizer.encode(_text_of(body))


def _text_of(body: Mapping[str, Any]) -> str:
    """What the prompt begins with comes first: tools and instructions, then the conversation."""
    head = [body.get(name) for name in ("tools", "system", "instructions")]
    for name in ("messages", "prompt", "input"):
        if (found := body.get(name)) is not None:
            said = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
            return json.dumps([part for part in head if part]) + said
    return ""
