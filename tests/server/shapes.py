"""Bodies and model outputs for fuzzing: JSON of all kinds, and text that looks like tool calls."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

WORDS = """
user assistant system developer tool function message text input_text image auto any none required
json_schema function_call function_call_output tool_use tool_result thinking reasoning disabled tiny
"""
KEY_WORDS = """
type role content text name id call_id tool_use_id input output arguments parameters schema function
format mode tools effort thinking description strict budget_tokens
"""
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(WORDS.split())
)
KEYS = st.sampled_from(KEY_WORDS.split()) | st.text(max_size=6)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)

FRAGMENTS = (
    *("<think>", "</think>", "\n", " ", "Well, ", "é", "😀", "<tool_call>", "</tool_call>", "<"),
    *('{"name": "look", "arguments": {"at": "', 'sea"}}', '{"name": "look", "arguments": {}}'),
)
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def bodies(required: dict[str, Any], names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """A working request with some of its fields replaced by anything at all."""
    changes = st.dictionaries(st.sampled_from(names), JSON, max_size=4)
    return changes.map(lambda changed: {**required, **changed})
