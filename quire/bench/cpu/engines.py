"""The engines that can be measured: one line each, and one file each with `open_peer(setup)`.

Nothing is imported here. A peer may live in another Python (`--python-of`), which has neither torch
nor anything else that Quire needs; its file uses the peer and the standard library alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quire.bench.cpu.work import WORKLOADS, Peer, Setup

Form = Literal["as given", "gguf", "folder"]  # of the weights it reads


@dataclass(frozen=True, slots=True)
class EngineKind:
    module: str  # under quire.bench.cpu
    package: str  # as pip knows it; "" for programs
    install: str  # how to get it
    form: Form
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    program: str = ""  # that must be on the PATH
    variables: Mapping[str, str] = field(default_factory=dict)  # of its process

    def open(self, setup: Setup) -> Peer:
        opened: Peer = importlib.import_module(f"quire.bench.cpu.{self.module}").open_peer(setup)
        return opened


OURS: dict[str, EngineKind] = {
    "quire": EngineKind("quire_packed", "quire", "", "as given"),
    "quire-fp32": EngineKind("quire_float32", "quire", "", "as given"),
}
PEERS: dict[str, EngineKind] = {
    "llama.cpp": EngineKind(
        "llama_cpp_peer",
        "llama-cpp-python",
        'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install llama-cpp-python',
        "gguf",
    ),
    "llama-server": EngineKind(
        "llama_server_peer",
        "",
        "build the target llama-server of llama.cpp and put its folder on the PATH",
        "gguf",
        workloads=("throughput",),
        program="llama-server",
    ),
    "openvino": EngineKind(
        "openvino_peer",
        "openvino-genai",
        "pip install openvino-genai",
        "gguf",
    ),
    "transformers": EngineKind(
        "transformers_peer",
        "transformers",
        "pip install transformers",
        "folder",
        variables={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    ),
}
ENGINES = OURS | PEERS
