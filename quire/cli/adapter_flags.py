"""The options of `quire serve` for adapters."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from typing import Any

from quire.cli.engine_flags import model_of
from quire.cli.parser import VerbParser, positive
from quire.errors import BadRequest


def add_adapter_flags(parser: VerbParser) -> None:
    add = parser.add_argument_group("adapters").add_argument
    add(
        "--lora",
        type=adapter,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="serve a PEFT folder under this name; may repeat",
    )
    add("--max-loras", type=positive, metavar="N", help="adapters in memory (default: 32)")
    add(
        "--max-cpu-loras",
        type=positive,
        metavar="N",
        help="copies of adapters in memory of the host (default: what an eighth of it holds)",
    )


def adapter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name.strip() or not path.strip():
        raise ArgumentTypeError(f"got {text!r}, want NAME=PATH, such as sql=./adapters/sql")
    return name, path


def adapter_options(args: Namespace) -> dict[str, Any]:
    """Fields of EngineArgs that were asked for."""
    from quire.server.server import model_name

    names = [name for name, _ in args.lora]
    served = args.served_model_name or (model_name(model_of(args)),)
    for name in names:
        if names.count(name) > 1 or name in served:
            raise BadRequest(f"got --lora {name}=..., but that name is taken; give another")
    given = {
        "lora": dict(args.lora) or None,
        "max_loras": args.max_loras,
        "max_cpu_loras": args.max_cpu_loras,
    }
    return {name: value for name, value in given.items() if value is not None}
