"""LoRARequest: which adapter a call of `LLM` runs with, its fields named as vLLM names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import BadRequest


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name. It is read from its folder at its first use.

    >>> LoRARequest("sql", 1, "/adapters/sql").lora_name
    'sql'
    """

    lora_name: str
    lora_int_id: int = 1  # vLLM's number of the adapter; here the name tells adapters apart
    lora_path: str = ""  # a PEFT folder; empty: an adapter that was loaded before

    def __post_init__(self) -> None:
        check_name(self.lora_name)


def each_adapter(asked: object, count: int) -> list[LoRARequest | None]:
    """For each prompt: one request for all of them, or a list."""
    each = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else None
    if each is None:
        each = [asked] * count
    if len(each) != count:
        raise BadRequest(f"got {len(each)} lora_requests for {count} prompts", param="lora_request")
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise BadRequest(
                f"got lora_request={one!r}, want LoRARequest(name, number, path)",
                param="lora_request",
            )
    return each


def check_name(name: object) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME:
        raise BadRequest(
            f"got the adapter name {str(name)[:40]!r}, want 1 to {MAX_NAME} characters",
            param="lora_name",
        )
    return name


MAX_NAME = 200  # characters
