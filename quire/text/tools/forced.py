"""Forced calls: the schema that lets the model write nothing but calls, and the parser for that.

With `tool_choice` "required" or a named function the output is constrained to a JSON array of
`{"name": ..., "parameters": {...}}`, whatever format the model speaks by itself. The grammar side
only sees an ordinary JSON schema. An output that ends too early leaves calls behind and no text.
Without a grammar the same parser still works: what breaks is text.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.text.messages import Json
from quire.text.tools.call_list import CallList
from quire.text.tools.definitions import Tool, ToolChoice
from quire.text.tools.marked import MarkedParser, Markup
from quire.text.tools.parser import NewId, openai_call_id

FORCED = Markup(body=CallList, starts_inside=True, is_all_calls=True)


class ForcedCallParser(MarkedParser):
    """Reads an output that follows `forced_schema`."""

    def __init__(self, new_id: NewId = openai_call_id) -> None:
        super().__init__(FORCED, new_id)


def forced_schema(tools: Sequence[Tool], choice: ToolChoice, parallel: bool) -> dict[str, Json]:
    """JSON schema of an output that calls the chosen tools and says nothing else."""
    chosen = [tool for tool in tools if choice.name in (None, tool.name)]
    assert chosen, f"no tool for {choice}"
    shared: dict[str, Json] = {}
    calls: list[Json] = [_call_schema(tool, shared) for tool in chosen]
    schema: dict[str, Json] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
    }
    if choice.name is not None or not parallel:
        schema["maxItems"] = 1
    return {**schema, "$defs": shared} if shared else schema


def _call_schema(tool: Tool, shared: dict[str, Json]) -> dict[str, Json]:
    parameters: Json = {k: v for k, v in tool.parameters.items() if k not in ("$schema", "$id")}
    assert isinstance(parameters, dict)
    parameters["type"] = "object"
    if parameters.get("properties", {}) == {} and "additionalProperties" not in parameters:
        parameters["additionalProperties"] = False  # a tool that takes nothing
    if _has_reference(parameters):
        # References count from the root of the document, which is no longer the tool's own.
        root = f"#/$defs/{tool.name}"
        shared[tool.name] = _rebased(parameters, root)
        parameters = {"$ref": root}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _has_reference(schema: Json) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(map(_has_reference, schema.values()))
    return isinstance(schema, list) and any(map(_has_reference, schema))


def _rebased(schema: Json, root: str) -> Json:
    if isinstance(schema, list):
        return [_rebased(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {key: _rebased(value, root) for key, value in schema.items()}
    reference = rebased.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        rebased["$ref"] = root + reference[1:]
    return rebased
