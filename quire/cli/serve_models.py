"""`quire serve A B=path C`, or a TOML file: the models of one server.

Options of the command line are for all models. A file has a table for each, with fields of
`EngineArgs` and of `ModelSettings`, and may say what `model: "auto"` means
(`routing/settings.py`):

    [models.coder]
    model = "qwen2.5-coder-0.5b-instruct"
    at_start = false
    park_after_s = 600
"""

from __future__ import annotations

import tomllib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.cli.adapter_flags import adapter_options
from quire.cli.engine_flags import checked_args, engine_args, engine_options, model_of
from quire.cli.parser import VerbParser, size_bytes
from quire.errors import BadRequest

if TYPE_CHECKING:
    from quire.config import EngineArgs
    from quire.routing.settings import AutoSettings
    from quire.server.settings import ModelSettings

OWN = ("at_start", "park_after_s")
MAX_MODELS = 64


class Wanted(NamedTuple):
    name: str
    model: str
    options: dict[str, Any]  # fields of EngineArgs
    own: dict[str, Any]  # fields of ModelSettings


def add_models_flags(parser: VerbParser) -> None:
    add = parser.add_argument_group("several models").add_argument
    add("--memory", type=size_bytes, metavar="SIZE", help="for all engines together, such as 16GiB")
    add("--park-after", type=float, metavar="S", help="seconds idle after which weights go")
    add("--on-demand", action="store_true", help="load a model when a request first names it")


def is_several(words: Sequence[str]) -> bool:
    return len(words) > 1 or any("=" in word or word.endswith(".toml") for word in words)


def wanted_models(args: Namespace) -> list[Wanted]:
    """Raises BadRequest for names and fields that cannot be."""
    words = args.model_words
    if len(words) == 1 and words[0].endswith(".toml"):
        found = _from_file(Path(words[0]))
    else:
        found = [_from_word(word) for word in words]
    if not 1 <= len(found) <= MAX_MODELS:
        raise BadRequest(f"got {len(found)} models, want 1 to {MAX_MODELS}")
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise BadRequest(f"got two models called {name!r}; write NAME=MODEL for one of them")
    if args.served_model_name or args.lora or args.model:
        raise BadRequest(
            "got several models with --served-model-name, --lora or --model: name models as"
            " NAME=MODEL, and give adapters in a TOML file or load them later"
        )
    return found


def wanted_auto(args: Namespace, names: Sequence[str]) -> AutoSettings | None:
    """What the file says of `model: "auto"`; raises BadRequest."""
    path = Path(args.model_words[0])
    if path.suffix != ".toml" or "auto" not in (data := _read(path)):
        return None
    from quire.routing.settings import read_auto

    try:
        return read_auto(data["auto"], names, path.parent)
    except BadRequest as error:
        raise BadRequest(f"{path}: {error}") from None


def engine_fields(args: Namespace, download: bool) -> dict[str, Any]:
    """Fields of ServeSettings: the engine of one model, or those of several."""
    from quire.load.recommended import recommended_sampling

    if args.answer_cache != "off" and args.no_store:
        raise BadRequest(
            f"got --answer-cache {args.answer_cache} with --no-store; give one of them"
        )
    if is_several(args.model_words):
        models = tuple(model_settings(args, one, download) for one in wanted_models(args))
        args.model_word = models[0].name
        auto = wanted_auto(args, [one.name for one in models])
        return {"engine": models[0].engine, "models": models, "auto": auto}
    args.model_word = next(iter(args.model_words), None)
    engine = _engine(args, download)
    sampling: dict[str, int | float] = {}
    if download and args.generation_config == "auto":
        sampling = recommended_sampling(model_of(args), Path(engine.model))
    return {"engine": engine, "default_sampling": sampling}


def _engine(args: Namespace, download: bool) -> EngineArgs:
    make = engine_args if download else checked_args
    more = {"seed": args.engine_seed, **_served(args), **adapter_options(args)}
    return _hinted(args, make(args, **more))


def _served(args: Namespace) -> dict[str, Any]:
    """What a server does otherwise than a program, unless a flag says how."""
    return {} if "target_gap_ms" in engine_options(args) else {"target_gap_ms": None}


def _hinted(args: Namespace, engine: EngineArgs) -> EngineArgs:
    """With hints, where answers that were given before may be such."""
    from quire.speculative import with_hints

    if args.answer_cache not in ("draft", "answer"):
        return engine
    return replace(engine, speculative_config=with_hints(engine.speculative_config))


def model_settings(args: Namespace, wanted: Wanted, download: bool) -> ModelSettings:
    from quire.args_check import check_args
    from quire.cli.download import fetch
    from quire.flat_args import args_of
    from quire.load.recommended import recommended_sampling
    from quire.server.settings import ModelSettings

    options = engine_options(args) | _served(args) | {"seed": args.engine_seed} | wanted.options
    model = str(fetch(wanted.model)) if download else wanted.model
    try:
        engine = _hinted(args, args_of({"model": model, **options}))
    except TypeError as error:
        raise BadRequest(f"models.{wanted.name}: {error}") from None
    check_args(engine)
    sampling: dict[str, int | float] = {}
    if download and args.generation_config == "auto":
        sampling = recommended_sampling(wanted.model, Path(model))
    own: dict[str, Any] = {
        "at_start": not args.on_demand,
        "park_after_s": args.park_after or 0.0,
    } | wanted.own
    return ModelSettings(name=wanted.name, engine=engine, default_sampling=sampling, **own)


def _from_word(word: str) -> Wanted:
    from quire.server.server import model_name

    name, mark, model = word.partition("=")
    if mark and (not name.strip() or not model.strip()):
        raise BadRequest(f"got {word!r}, want NAME=MODEL")
    return Wanted(name, model, {}, {}) if mark else Wanted(model_name(word), word, {}, {})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRequest(f"{path}: {error}") from None


def _from_file(path: Path) -> list[Wanted]:
    data = _read(path)
    models = data.get("models")
    if not isinstance(models, dict) or set(data) - {"auto"} != {"models"}:
        raise BadRequest(f"{path}: want tables [models.NAME], [auto] and nothing else")
    return [_from_table(name, table, path) for name, table in models.items()]


def _from_table(name: str, table: object, path: Path) -> Wanted:
    from quire.flat_args import arg_names

    if not isinstance(table, Mapping) or not isinstance(model := table.get("model"), str):
        raise BadRequest(f'{path}: [models.{name}] wants model = "..."')
    known = arg_names() | set(OWN)
    if unknown := sorted(set(table) - known):
        raise BadRequest(
            f"{path}: [models.{name}] has {', '.join(unknown)}, want {', '.join(sorted(known))}"
        )
    _check_own(name, table, path)
    own = {key: table[key] for key in OWN if key in table}
    options = {key: value for key, value in table.items() if key not in (*OWN, "model")}
    return Wanted(name, model, options, own)


def _check_own(name: str, table: Mapping[str, object], path: Path) -> None:
    if not isinstance(table.get("at_start", True), bool):
        raise BadRequest(f"{path}: [models.{name}] wants at_start = true or false")
    seconds = table.get("park_after_s", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise BadRequest(f"{path}: [models.{name}] wants park_after_s = seconds, 0 for never")
