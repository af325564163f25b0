"""ChatTemplate: messages in, prompt text out, whatever the template tries.

Templates are written for Hugging Face's renderer (trimmed blocks, `raise_exception`, `tojson` that
does not escape) and come with the model, so they run in the metered sandbox of `sandbox.py`. What
the template rejects, or cannot render, is a BadRequest; a template that does not compile or breaks
out of bounds is a CheckpointError. Tokenising is left to `tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateSyntaxError

from quire.errors import BadRequest, CheckpointError
from quire.text.messages import Json, Message, check_messages, check_tools, plain_json
from quire.text.meter import LimitReached, Meter, metered
from quire.text.sandbox import ChatEnvironment, TemplateRefusal

MAX_SOURCE_CHARS = 128_000
MAX_VARIABLES = 32
MAX_INPUT = 48_000_000  # bytes of messages and tools together
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatTemplate:
    """One compiled chat template with the special tokens it prints.

    >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    '[user] Hi'
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._tokens = dict(tokens or {})  # bos_token, eos_token, ...
        self._template = compile_template(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text. Raises BadRequest with the template's or our own reason."""
        inputs: dict[str, Json] = {
            **self._tokens,
            **_check_variables(variables or {}),
            "messages": list(check_messages(messages)),
            "tools": check_tools(tools),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        scale = Meter()
        scale.max_value = MAX_INPUT
        try:
            weight = scale.weigh(inputs)
        except LimitReached as error:
            raise BadRequest(f"the messages are too large: {error}", param="messages") from None
        return _render(self._template, inputs, Meter(weight))


@lru_cache(maxsize=64)
def compile_template(source: str) -> Template:
    """Compile once per source text; raises CheckpointError with the line at fault."""
    if len(source) > MAX_SOURCE_CHARS:
        raise CheckpointError(
            f"the chat template has {len(source)} characters, want at most {MAX_SOURCE_CHARS}"
        )
    try:
        with metered(Meter()):
            return _environment().compile_metered(source)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template does not compile, line {error.lineno}: {error.message}"
        ) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError, LimitReached) as error:
        # Python's own compiler gives up on what nests too deeply.
        raise CheckpointError(f"the chat template does not compile: {error}") from error


@cache
def _environment() -> ChatEnvironment:
    return ChatEnvironment()


def _render(template: Template, inputs: dict[str, Json], meter: Meter) -> str:
    try:
        with metered(meter):
            return _collect(template.generate(inputs), meter.max_value)
    except TemplateRefusal as error:
        raise BadRequest(
            f"the chat template rejects these messages: {error}", param="messages"
        ) from None
    except (SecurityError, LimitReached) as error:
        raise CheckpointError(f"the chat template is refused: {error}") from error
    except Exception as error:  # a template is foreign code: it can raise whatever Python can
        raise BadRequest(
            f"the chat template cannot render these messages: {type(error).__name__}: {error}",
            param="messages",
        ) from error


def _collect(chunks: Iterable[str], max_chars: int) -> str:
    texts: list[str] = []
    room = max_chars
    for chunk in chunks:
        room -= len(chunk)
        if room < 0:
            raise LimitReached(f"it prints more than {max_chars} characters")
        texts.append(chunk)
    return "".join(texts)


def _check_variables(variables: Mapping[str, object]) -> dict[str, Json]:
    if len(variables) > MAX_VARIABLES:
        raise BadRequest(f"got {len(variables)} template variables, want at most {MAX_VARIABLES}")
    for name in variables:
        if name in RESERVED or not name.isidentifier() or name.startswith("_"):
            raise BadRequest(f"got template variable {name!r}, which is reserved", param=name)
    return {name: plain_json(value, name) for name, value in variables.items()}
