"""A PEFT adapter folder: low-rank pairs by module, all of it checked before any of it is used.

`adapter_config.json` says how results are scaled, `adapter_model.safetensors` holds A and B of each
module. What would change a result in a way that nothing here computes (DoRA, embeddings, modules
saved whole) is refused by name, and so are pickled files. `placed.py` fits the pairs to a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import CheckpointError, NotSupported, shown
from quire.jsonfile import read_object
from quire.load.safetensors_checkpoint import Shard

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 4_000_000
MAX_RANK = 1024
MAX_ALPHA = 1e30  # what it scales stays a number in fp32
HASHED_AT_ONCE, HASHERS = 4 << 20, 8  # bytes, threads
PREFIX = "base_model.model."
SHRINK, EXPAND = ".lora_A.weight", ".lora_B.weight"
KEPT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

MERGE = "merge it into the model, or train without it"
# Fields of adapter_config.json whose value, where there is one, changes what a layer computes.
REFUSED = {
    "use_dora": "DoRA rescales every column of the weight, which takes the weight itself",
    "modules_to_save": "whole modules take the place of the model's own",
    "trainable_token_indices": "embeddings of single tokens are replaced",
    "target_parameters": "parameters that are no linear layers are adapted",
    "layer_replication": "layers are repeated",
    "lora_bias": "B has a bias",
    "use_qalora": "inputs are pooled by groups before A",
    "alora_invocation_tokens": "the adapter begins in the middle of a prompt",
    "arrow_config": "several adapters are mixed by a router",
    "use_bdlora": "A and B are block-diagonal",
    "kasa_config": "the weight's own singular values are removed first",
    "monteclora_config": "A is drawn from a distribution",
    "velora_config": "inputs are projected before A",
}
# Ways to begin that take the beginning out of the model's own weights.
CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What one module's result gets added: scale * B(A(x))."""

    shrink: Tensor  # A [rank, in], as stored
    expand: Tensor  # B [out, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.shrink.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.shrink, self.expand


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    path: Path
    modules: Mapping[str, LowRank]  # by the module's name in Hugging Face's model
    hashing: Future[bytes]

    @property
    def digest(self) -> bytes:
        """Of all that decides on results."""
        return self.hashing.result()

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.modules.values())


def read_adapter(path: str | Path, pinned: bool = False) -> AdapterFolder:
    """Raises CheckpointError for a folder that is damaged, NotSupported for what is not done.

    `pinned`: into memory that a GPU copies from."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}; give the path of a PEFT adapter")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"no {CONFIG} in {folder}: want the folder of a PEFT adapter")
    config = read_object(folder / CONFIG, MAX_CONFIG_BYTES)
    _check_config(config, folder)
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(_no_weights(folder))
    shard = Shard(folder / WEIGHTS)
    scales, names = _Scales.of(config, folder), _module_names(shard, folder)
    hashing = _hash(shard.load(pinned), [(name, *scales.of_module(name)) for name in names])
    are_finite = _are_finite(shard)
    modules = {name: _pair(shard, name, scales, are_finite) for name in names}
    return AdapterFolder(folder, modules, hashing)


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise NotSupported(f"{folder}: got peft_type={shown(kind)}, want 'LORA'")
    for name, why in REFUSED.items():
        if value := config.get(name):
            raise NotSupported(f"{folder}: got {name}={shown(value)}: {why}; {MERGE}")
    if (bias := config.get("bias", "none")) != "none":
        raise NotSupported(f"{folder}: got bias={shown(bias)}: biases are trained too; {MERGE}")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGES_THE_BASE):
        raise NotSupported(
            f"{folder}: got init_lora_weights={begun!r}, which changes the model's own weights;"
            " save it with path_initial_model_for_weight_conversion, as a plain adapter"
        )


def _no_weights(folder: Path) -> str:
    if (folder / PICKLED).is_file():
        return (
            f"{folder} has only pickled weights ({PICKLED}), which can run code when read:"
            " save the adapter with safe_serialization=True"
        )
    return f"no {WEIGHTS} in {folder}"


@dataclass(frozen=True, slots=True)
class _Scales:
    """Ranks that the config tells, and what results are multiplied by."""

    folder: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, Any]  # of modules that have their own, by pattern
    alphas: Mapping[str, Any]

    @staticmethod
    def of(config: Mapping[str, Any], folder: Path) -> _Scales:
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise CheckpointError(f"{folder / CONFIG}: got r={shown(rank)}, want a rank >= 1")
        patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
        for pattern in patterns:
            _check_pattern(pattern, folder)
        for key, own in patterns[0].items():
            if own != int(own):
                raise CheckpointError(
                    f"{folder / CONFIG}: got the rank {shown(key)}: {own}, want a whole number"
                )
        is_stabilized = config.get("use_rslora") is True
        ranks, alphas = patterns
        alpha = _number("lora_alpha", alpha, folder)
        return _Scales(folder, rank, alpha, is_stabilized, ranks, alphas)

    def of_module(self, name: str) -> tuple[int, float]:
        """(rank, scale). Raises NotSupported."""
        rank = int(_matched(self.ranks, name, self.rank))
        if rank > MAX_RANK:
            raise NotSupported(
                f"{self.folder}: {name} has rank {shown(rank)}, the most is {MAX_RANK}; merge it"
                " into the model"
            )
        alpha = float(_matched(self.alphas, name, self.alpha))
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _number(name: str, value: object, folder: Path) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not abs(value) <= MAX_ALPHA  # nor NaN
    ):
        raise CheckpointError(
            f"{folder / CONFIG}: got {name}={shown(value)}, want a number of at most {MAX_ALPHA:g}"
        )
    return float(value)


def _check_pattern(pattern: object, folder: Path) -> None:
    if not isinstance(pattern, dict):
        raise CheckpointError(
            f"{folder / CONFIG}: got the pattern {shown(pattern)}, want an object"
        )
    for key, value in pattern.items():
        # A pattern comes with the file; one without repetition is matched in no time.
        if any(sign in key for sign in "*+?{") or len(key) > 300:
            raise NotSupported(
                f"{folder / CONFIG}: got the pattern {shown(key)}, want names of modules without"
                " repetition; write them out"
            )
        if _number(shown(key), value, folder) <= 0:
            raise CheckpointError(f"{folder / CONFIG}: got {shown(key)}: {value}, want it above 0")
        try:
            re.compile(key)
        except re.error as error:
            raise CheckpointError(f"{folder / CONFIG}: bad pattern {shown(key)}: {error}") from None


def _matched(patterns: Mapping[str, Any], name: str, default: float) -> float:
    """As PEFT reads them: the first pattern that the end of a module's name matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return float(value)
    return default


def _module_names(shard: Shard, folder: Path) -> list[str]:
    """Of modules that have both halves; anything else in the file is refused."""
    names: dict[str, set[str]] = {}
    for tensor in shard.entries:
        half = next((half for half in (SHRINK, EXPAND) if tensor.endswith(half)), None)
        if half is None or not tensor.startswith(PREFIX):
            raise NotSupported(
                f"{folder}: got the tensor {tensor!r}, want only"
                f" {PREFIX}MODULE{SHRINK} and {EXPAND}: {_why_not(tensor)}; {MERGE}"
            )
        names.setdefault(tensor[len(PREFIX) : -len(half)], set()).add(half)
    for name, halves in names.items():
        if len(halves) < 2:
            lost = EXPAND if SHRINK in halves else SHRINK
            raise CheckpointError(f"{folder}: the tensor {PREFIX}{name}{lost} is missing")
    if not names:
        raise CheckpointError(f"{folder / WEIGHTS} holds no tensors")
    return sorted(names)


def _why_not(tensor: str) -> str:
    if "lora_magnitude_vector" in tensor:
        return "DoRA is not done"
    if "lora_embedding" in tensor or "embed" in tensor:
        return "adapters of embeddings are not done"
    return "nothing here adds it"


def _pair(shard: Shard, name: str, scales: _Scales, are_finite: bool) -> LowRank:
    rank, scale = scales.of_module(name)
    tensors = (PREFIX + name + half for half in (SHRINK, EXPAND))
    shrink, expand = (_tensor(shard, tensor, are_finite) for tensor in tensors)
    got = shrink.shape[0], expand.shape[1]
    if got != (rank, rank):
        raise CheckpointError(
            f"{shard.path}: {name} has A of rank {got[0]} and B of rank {got[1]}, but"
            f" {CONFIG} says {rank}; the two files do not belong together"
        )
    return LowRank(shrink, expand, scale)


def _tensor(shard: Shard, name: str, is_finite: bool) -> Tensor:
    tensor = shard.read(name)
    if tensor.ndim != 2 or not tensor.dtype.is_floating_point:
        raise CheckpointError(
            f"{shard.path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)},"
            " want a matrix of floats"
        )
    tensor = tensor if tensor.dtype in KEPT_DTYPES else tensor.float()
    if not is_finite and not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{shard.path}: {name} holds NaN or infinity")
    return tensor


def _are_finite(shard: Shard) -> bool:
    """Whether all numbers of the file are, as far as one look shows; else each tensor is asked."""
    numbers = shard.numbers()
    if numbers is None or numbers.dtype not in KEPT_DTYPES:
        return False
    # What is no number shows in a sum, which is quick; so does a sum that is too large for one.
    return math.isfinite(numbers.sum(dtype=torch.float32).item())


def _hash(data: NDArray[np.uint8], scales: list[tuple[str, int, float]]) -> Future[bytes]:
    """Of the file and of how its modules are scaled; by threads, while the weights are placed. The
    file goes in parts, whose digests are digested."""

    def of(begin: int) -> bytes:
        return sha256(data[begin : begin + HASHED_AT_ONCE].data).digest()  # without the lock

    threads = ThreadPoolExecutor(HASHERS + 1, "adapter digest")
    parts = [threads.submit(of, begin) for begin in range(0, len(data), HASHED_AT_ONCE)]

    def run() -> bytes:
        told = repr((len(data), scales)).encode()
        return sha256(told + b"".join(part.result() for part in parts)).digest()

    found = threads.submit(run)
    threads.shutdown(wait=False)
    return found
