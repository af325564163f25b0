"""Hermes calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one tag each.

Hermes 2 and 3, Qwen 2.5 and Qwen 3 write them so. SmolLM2 puts an array of calls into one tag,
which is read the same way.
"""

from __future__ import annotations

from quire.text.tools.call_list import CallList
from quire.text.tools.marked import MarkedParser, Markup
from quire.text.tools.parser import NewId, openai_call_id

OPENER = "<tool_call>"
CLOSER = "</tool_call>"
HERMES = Markup(opener=OPENER, body=CallList, closer=CLOSER)


def hermes_parser(new_id: NewId = openai_call_id) -> MarkedParser:
    return MarkedParser(HERMES, new_id)
