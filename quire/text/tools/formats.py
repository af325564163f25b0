"""The tool-call formats by name, and which of them a model speaks.

The names are those of vLLM's `--tool-call-parser`. Detection reads the chat template: a model was
trained on what its template prints. To add a format: one file with a `Markup`, one line here.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.registry import Registry
from quire.text.tools import hermes, llama3_json, mistral, pythonic
from quire.text.tools.parser import ToolParser

TOOL_PARSERS = Registry(
    "tool call parser",
    {
        "hermes": "quire.text.tools.hermes:hermes_parser",
        "json": "quire.text.tools.hermes:hermes_parser",  # SmolLM2's arrays in Hermes tags
        "llama3_json": "quire.text.tools.llama3_json:llama3_json_parser",
        "llama4_json": "quire.text.tools.llama3_json:llama3_json_parser",
        "llama4_pythonic": "quire.text.tools.pythonic:pythonic_parser",
        "mistral": "quire.text.tools.mistral:mistral_parser",
        "pythonic": "quire.text.tools.pythonic:pythonic_parser",
    },
)

# Templates that also say <tool_call> but fill it with something other than JSON.
_OTHER_FORMATS = ("<function=", "<arg_key>", "<tool_calls>")


def tool_parser(name: str) -> ToolParser:
    """A fresh parser for one completion. Raises NotSupported with the names there are."""
    parser: ToolParser = TOOL_PARSERS.get(name)()
    return parser


def needs_special_tokens(name: str) -> bool:
    """Whether the format's markers are special tokens, which detokenizing must not leave out."""
    return name not in ("hermes", "json")


def detect_tool_format(chat_template: str | None, vocab: Collection[str] = ()) -> str | None:
    """The format a model's template writes calls in; None if it does not know tools, or ours."""
    template = chat_template or ""
    if "tools" not in template or any(mark in template for mark in _OTHER_FORMATS):
        return None
    if hermes.OPENER in template and '"arguments' in template:
        return "hermes"
    if mistral.OPENER in template:
        return "mistral"
    if pythonic.OPENER in template or "[func_name1(" in template:
        return "pythonic"
    # Llama 3.2 prints calls without the tag, but it has the token, and the role for results.
    is_llama = "ipython" in template or llama3_json.OPENER in vocab
    prints_calls = is_llama and '"parameters"' in template
    return "llama3_json" if prints_calls or llama3_json.OPENER in template else None
