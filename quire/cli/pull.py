"""quire pull: fetch models into the cache, or list the ones known by name."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from quire.cli.parser import VerbParser
from quire.cli.show import note, print_json, print_table
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.load.known import KnownModel

EXAMPLES = """
quire pull default
quire pull smollm2-135m-instruct qwen2.5-coder-0.5b-instruct
quire pull HuggingFaceTB/SmolLM2-360M-Instruct
quire pull --list
"""


def build_parser() -> VerbParser:
    parser = VerbParser("pull", "Download models into the cache.", EXAMPLES, "[NAME ...]")
    parser.add_argument("names", nargs="*", metavar="NAME", help="known name or hub repository")
    parser.flag("--list", "show the models known by name", action="store_true")
    parser.flag("--json", "one JSON object per model", action="store_true")
    return parser


def run(args: Namespace) -> int:
    if args.list:
        _list(args.json)
    elif not args.names:
        raise BadRequest("no model named; 'quire pull --list' shows the known ones")
    from quire.cli.download import fetch
    from quire.load.hub import file_bytes
    from quire.memory.sizing import size_text

    for name in args.names:
        path = fetch(name)
        size = file_bytes(path)
        if args.json:
            print_json({"name": name, "path": str(path), "bytes": size})
        else:
            note(f"{name}: {size_text(size)}")
            print(path)
    return 0


def _list(as_json: bool) -> None:
    from quire.load.known import KNOWN_MODELS

    if as_json:
        for model in KNOWN_MODELS:
            print_json(
                {
                    "name": model.name,
                    "aliases": list(model.aliases),
                    "description": model.description,
                    "licence": model.licence,
                    "source": str(model.source),
                    "cached": is_cached(model),
                }
            )
        return
    rows = [
        (
            ", ".join((model.name, *model.aliases)),
            model.description,
            model.source,
            model.licence,
            "yes" if is_cached(model) else "no",
        )
        for model in KNOWN_MODELS
    ]
    print_table(("name", "what", "source", "licence", "cached"), rows)


def is_cached(model: KnownModel) -> bool:
    """Whether a pull would find its files in place; they are not read again for this."""
    from quire import env
    from quire.load.known import WheelSource

    source = model.source
    if isinstance(source, WheelSource):
        file = env.cache_folder() / "models" / model.name / source.filename
        return file.is_file() and file.stat().st_size == source.size
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(source.repo, "config.json"), str)
