"""open_model: a name, folder or .gguf file -> checkpoint and tokenizer. Nothing is loaded yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config import EngineArgs
from quire.errors import CheckpointError
from quire.load.checkpoint import Checkpoint, Stored
from quire.load.hub import resolve_model
from quire.load.torch_import import begin_import

if TYPE_CHECKING:
    from torch import Tensor

    from quire.quant.weight import Weight
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenModel:
    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None


def open_model(args: EngineArgs) -> OpenModel:
    """What needs torch comes last: it is being imported meanwhile."""
    path = resolve_model(args.model)
    begin_import()
    wants_text = not args.skip_tokenizer_init
    checkpoint: Checkpoint
    tokenizer = None
    if path.suffix == ".gguf":
        from quire.load.gguf import GGUFFile

        file = GGUFFile.open(path)
        if wants_text and args.tokenizer is None:
            tokenizer = _gguf_tokenizer(file.metadata, str(path))
        from quire.load.gguf_checkpoint import GGUFCheckpoint

        checkpoint = GGUFCheckpoint(file)
    elif args.load_format == "dummy":
        checkpoint = ConfigOnly.open(path)
    else:
        from quire.load.safetensors_checkpoint import SafetensorsCheckpoint

        checkpoint = SafetensorsCheckpoint.open(path)
    if wants_text and tokenizer is None:
        tokenizer = _folder_tokenizer(resolve_model(args.tokenizer) if args.tokenizer else path)
    return OpenModel(path, checkpoint, tokenizer)


def open_tokenizer(args: EngineArgs) -> Tokenizer:
    """The tokenizer alone, without torch: for a process that only handles text."""
    path = resolve_model(args.tokenizer or args.model)
    if path.suffix != ".gguf":
        return _folder_tokenizer(path)
    from quire.load.gguf import GGUFFile

    return _gguf_tokenizer(GGUFFile.open(path).metadata, str(path))


def has_tokenizer(args: EngineArgs) -> bool:
    """Whether there is one, be it good or bad."""
    path = resolve_model(args.tokenizer or args.model)
    if path.suffix != ".gguf":
        return (path / "tokenizer.json").is_file()
    from quire.load.gguf import GGUFFile

    return "tokenizer.ggml.model" in GGUFFile.open(path).metadata


def _gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    from quire.text.gguf_vocab import tokenizer_from_gguf
    from quire.text.tokenizer import Tokenizer

    return Tokenizer.from_gguf_vocab(tokenizer_from_gguf(metadata, source))


def _folder_tokenizer(path: Path) -> Tokenizer:
    from quire.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(path)


class ConfigOnly:
    """A checkpoint with a config and no tensors: for load_format='dummy'."""

    files: Sequence[Path] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @staticmethod
    def open(path: Path) -> ConfigOnly:
        from quire.load.safetensors_checkpoint import read_config

        return ConfigOnly(read_config(path))

    def names(self) -> Sequence[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        raise CheckpointError(f"no tensor {name}: only the config was opened")

    def read(self, name: str) -> Tensor:
        raise CheckpointError(f"no tensor {name}: only the config was opened")

    def stored(self, name: str) -> Stored:
        raise CheckpointError(f"no tensor {name}: only the config was opened")

    def packed(self, name: str, rows: slice | None = None) -> Weight | None:
        return None
