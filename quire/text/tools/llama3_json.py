"""Llama 3 calls: the output is `{"name": ..., "parameters": {...}}`, more after `;` or a newline.

The model may put `<|python_tag|>` in front, also after some text. Without the tag only an output
that begins with a call is one; an answer that is JSON for another reason stays text.
"""

from __future__ import annotations

from quire.text.tools.call_list import CallList
from quire.text.tools.marked import CallBody, MarkedParser, Markup
from quire.text.tools.parser import NewId, openai_call_id
from quire.text.tools.writer import PartWriter

OPENER = "<|python_tag|>"


def _bare_calls(writer: PartWriter) -> CallBody:
    # Nothing marks these, so the bar is higher: {"name": "Ada"} is just an object.
    return CallList(writer, may_lack_arguments=False)


LLAMA3_JSON = Markup(opener=OPENER, body=_bare_calls, starts_inside=True)


def llama3_json_parser(new_id: NewId = openai_call_id) -> MarkedParser:
    return MarkedParser(LLAMA3_JSON, new_id)
