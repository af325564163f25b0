"""Tools and tool_choice as clients send them, checked: OpenAI's shapes in, small values out.

Everything that can be wrong with them is found here, before a prompt is made of them, and named by
its path. Whether a parameter schema can be enforced is the grammar's to say; here it only has to
be the schema of an object.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from quire.errors import BadRequest
from quire.text.messages import Json, plain_json
from quire.text.tools.parser import MAX_NAME_CHARS

MAX_TOOLS = 128
_NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_-")
_CHOICE_SHAPE = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None
    parameters: dict[str, Json]  # JSON schema of an object
    is_strict: bool = False

    def definition(self) -> dict[str, Json]:
        """The tool as chat templates print it."""
        function: dict[str, Json] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["auto", "none", "required"]
    name: str | None = None  # with "required": the one tool to call

    @property
    def is_forced(self) -> bool:
        return self.mode == "required"


def check_tools(tools: object) -> list[Tool]:
    """Raises BadRequest with the path of what is wrong; null is no tools."""
    if tools is None:
        return []
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        _refuse("tools", tools, "a list of tools")
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"got {len(tools)} tools, want at most {MAX_TOOLS}", param="tools")
    checked: list[Tool] = []
    places: dict[str, int] = {}
    for i, tool in enumerate(tools):
        checked.append(_check_tool(tool, f"tools[{i}]"))
        first = places.setdefault(checked[-1].name, i)
        if first != i:
            raise BadRequest(
                f"tools[{first}] and tools[{i}] are both named {checked[-1].name!r}; rename one",
                param=f"tools[{i}].function.name",
            )
    return checked


def check_tool_choice(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """What the client wants done with the tools; null is "auto" if there are any."""
    if choice is None:
        choice = "auto"
    if choice == "auto" or choice == "none":
        return ToolChoice("auto" if choice == "auto" and tools else "none")
    name = None if choice == "required" else _chosen_name(choice)
    if not tools:
        raise BadRequest(
            f"got tool_choice={choice!r} without tools; send the tools, or drop tool_choice",
            param="tool_choice",
        )
    if name is not None and all(tool.name != name for tool in tools):
        known = ", ".join(repr(tool.name) for tool in tools[:8])
        raise BadRequest(
            f"tool_choice names {name!r}, which is not among the tools: {known}",
            param="tool_choice.function.name",
        )
    return ToolChoice("required", name)


def _chosen_name(choice: object) -> str:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        _refuse("tool_choice", choice, _CHOICE_SHAPE)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        _refuse("tool_choice.function.name", name, "the name of one of the tools")
    return name


def _check_tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        _refuse(where, tool, '{"type": "function", "function": {...}}')
    if tool.get("type") != "function":
        _refuse(f"{where}.type", tool.get("type"), "'function', the only kind there is")
    function = tool.get("function")
    where = f"{where}.function"
    if not isinstance(function, Mapping):
        _refuse(where, function, '{"name": ..., "description": ..., "parameters": {...}}')
    name, description, strict = (function.get(k) for k in ("name", "description", "strict"))
    if not isinstance(name, str) or not _is_tool_name(name):
        shape = f"1 to {MAX_NAME_CHARS} letters, digits, '_' or '-'"
        _refuse(f"{where}.name", name, shape)
    if description is not None and not isinstance(description, str):
        _refuse(f"{where}.description", description, "a string, or none")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"{where}.strict", strict, "true or false")
    plain_json(description, f"{where}.description")
    return Tool(
        name,
        description,
        _check_parameters(function.get("parameters"), f"{where}.parameters"),
        bool(strict),
    )


def _check_parameters(parameters: object, where: str) -> dict[str, Json]:
    if parameters is None:
        return {"type": "object", "properties": {}}
    schema = plain_json(parameters, where)
    if not isinstance(schema, dict):
        _refuse(where, parameters, "a JSON schema object")
    if schema.get("type", "object") != "object":
        _refuse(f"{where}.type", schema["type"], "'object': arguments are passed by name")
    if not isinstance(schema.get("properties", {}), dict):
        _refuse(f"{where}.properties", schema["properties"], "an object of schemas by name")
    return schema


def _is_tool_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME_CHARS and _NAME_CHARS.issuperset(name)


def _refuse(where: str, value: object, want: str) -> NoReturn:
    shown = repr(value) if value is None or isinstance(value, (str, int, float)) else ""
    got = f"{where}={shown[:80]}" if shown else f"{where} of type {type(value).__name__}"
    raise BadRequest(f"got {got}, want {want}", param=where)
