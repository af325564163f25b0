"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go, as vLLM has it.

Requests under way keep theirs to the end. The paths are this machine's, so callers are operators.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.engine import commands as msg
from quire.lora.request import check_name
from quire.server.fields import decode
from quire.server.http import HttpRequest, Reply
from quire.server.problems import Problem, Refused
from quire.server.server import Server

TEXT = "text/plain; charset=utf-8"


class LoadFields(msgspec.Struct):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None  # in place of one that has the name
    base_model_name: str | None = None


class UnloadFields(msgspec.Struct):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's; the name is enough


async def load_adapter(request: HttpRequest, server: Server) -> Reply:
    fields = decode(request, LoadFields)
    name = check_name(fields.lora_name)
    if name in server.model_names:
        raise Problem(400, f"the name {name!r} is the model's own; give another", param="lora_name")
    if name in server.link.adapters:
        if not fields.load_inplace:
            raise Problem(
                400,
                f"the adapter {name!r} is loaded already; unload it first, or say load_inplace",
                param="lora_name",
            )
        await _ask(server, lambda number: msg.UnloadAdapter(number, name))
    await _ask(server, lambda number: msg.LoadAdapter(number, name, fields.lora_path))
    return _told(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(request: HttpRequest, server: Server) -> Reply:
    fields = decode(request, UnloadFields)
    name = fields.lora_name
    if name not in server.link.adapters:
        known = ", ".join(server.link.adapters) or "none"
        raise Problem(
            404,
            f"there is no adapter {name[:200]!r}; loaded: {known}",
            param="lora_name",
            code="model_not_found",
        )
    await _ask(server, lambda number: msg.UnloadAdapter(number, name))
    return _told(f"Success: LoRA adapter '{name}' removed successfully.")


async def _ask(server: Server, make: Callable[[int], msg.Command]) -> None:
    try:
        await server.link.ask(make)
    except Refused as error:
        raise Problem(400, str(error), param="lora_path") from None


def _told(text: str) -> Reply:
    return Reply(text.encode(), content_type=TEXT)
