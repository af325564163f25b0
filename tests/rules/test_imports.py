"""The direction of imports is a law, and so is what stays free of torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.rules.source import ROOT, imports, trees

# Lower may not import from higher. Packages on one line may not import from each other.
LAYERS: list[set[str]] = [
    {"errors", "version"},
    {"params", "registry", "env", "config", "jsonfile", "picture", "progress", "outputs", "inputs"},
    {"draft_tree"},
    {"speculative", "flat_args"},
    {"request", "sampling_params"},
    {"step"},
    {"kernels"},
    {"dist", "forward", "kv", "quant", "text"},
    {"native", "args_check"},
    {"attn", "sched", "obs", "grammar"},
    {"memory", "nn", "spec", "tiers"},
    {"models", "disagg"},
    {"sample", "load", "ops"},
    {"lora"},
    {"runner"},
    {"resolve"},
    {"engine"},
    {"offline", "batches"},
    {"kept", "answers"},
    {"routing"},
    {"llm"},
    {"bench"},
    {"evaluate"},
    {"compress"},
    {"distill"},
    {"server"},
    {"router"},
    {"sim"},
    {"deploy"},
    {"cli"},
]

# Imports against the law that were there when the law was written. May only shrink.
KNOWN_BREACHES = {
    ("quire/nn/attention.py", "models"),  # ModelSpec, in annotations only
    ("quire/nn/mlp.py", "models"),
    ("quire/nn/rope.py", "models"),
}

# `import X` must not bring in torch: these run in gateways, simulators and command lines.
TORCH_FREE = [
    "quire",
    "quire.errors",
    "quire.params",
    "quire.request",
    "quire.step",
    "quire.config",
    "quire.args_check",
    "quire.env",
    "quire.forward",
    "quire.outputs",
    "quire.registry",
    "quire.resolve",
    "quire.sched.scheduler",
    "quire.sched.queue",
    "quire.sched.finish",
    "quire.sched.stats",
    "quire.sched.costs",
    "quire.sched.cost_table",
    "quire.sim.simulate",
    "quire.dist.cuts",
    "quire.dist.launch",
    "quire.flat_args",
    "quire.spec.speculation",
    "quire.spec.suffix",
    "quire.speculative",
    "quire.kv.manager",
    "quire.kv.check",
    "quire.tiers.tiers",
    "quire.disagg.sockets",
    "quire.text.tokenizer",
    "quire.text.detokenize",
    "quire.text.stops",
    "quire.text.template",
    "quire.text.messages",
    "quire.text.gguf_vocab",
    "quire.engine.core",
    "quire.engine.intake",
    "quire.engine.output",
    "quire.engine.joint_loop",
    "quire.offline.vllm_args",
    "quire.offline.chat_prompt",
    "quire.offline.beam_search",
    "quire.offline.pooled",
    "quire.lora.adapters",
    "quire.lora.request",
    "quire.memory.sizing",
    "quire.load.hub",
    "quire.models.spec",
    "quire.models.registry",
    "quire.bench.cpu.child",
    "quire.bench.cpu.llama_cpp_peer",
    "quire.bench.cpu.llama_server_peer",
    "quire.bench.cpu.openvino_peer",
    "quire.batches.store",
    "quire.batches.output",
    "quire.router.main",
    "quire.kept.conversations",
    "quire.answers.index",
    "quire.routing.fit",
    "quire.cli.main",
]

HEAVY = {"torch", "triton", "transformers", "numpy", "tokenizers", "jinja2", "huggingface_hub"}


def place_of(module: str) -> int:
    name = module.split(".")[1] if "." in module else "quire"
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def test_imports_point_downwards() -> None:
    """Red when a lower package learns of a higher one, even inside a function."""
    breaches = set()
    for path, tree in trees().items():
        parts = path.removesuffix(".py").split("/")
        own = parts[1]
        if own in ("__init__", "__main__"):
            continue
        here = place_of(f"quire.{own}")
        for module, _ in imports(tree):
            if not module.startswith("quire.") or module == "quire.__version__":
                continue
            other = module.split(".")[1]
            if other != own and place_of(module) >= here:
                breaches.add((path, other))
    assert breaches - KNOWN_BREACHES == set(), "new imports against the direction"
    assert KNOWN_BREACHES - breaches == set(), "fixed: take these off the list"


def test_every_package_has_a_place() -> None:
    """Red when a new package arrives without deciding where it stands."""
    known = set().union(*LAYERS)
    names = {path.removesuffix(".py").split("/")[1] for path in trees()}
    assert names - known - {"__init__", "__main__"} == set()


def imported_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after one statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_importing_quire_is_light() -> None:
    """Red when `import quire` pulls in torch, triton, transformers or any other heavy package."""
    assert imported_by("import quire") & HEAVY == set()


def test_an_engine_needs_no_server() -> None:
    """Red when building an engine wants what only servers, grammars or metrics need."""
    lazy = {"granian", "h11", "llguidance", "msgspec", "prometheus_client", "uvicorn", "uvloop"}
    assert imported_by("import quire.llm, quire.engine.build") & lazy == set()


def test_policy_is_free_of_torch() -> None:
    """Red when a torch-free module, or anything it imports, starts to import torch or triton."""
    unwanted = {"torch", "triton", "transformers"}
    if imported_by("\n".join(f"import {module}" for module in TORCH_FREE)) & unwanted:
        guilty = [m for m in TORCH_FREE if imported_by(f"import {m}") & unwanted]
        raise AssertionError(f"these bring in torch, triton or transformers: {guilty}")


@pytest.mark.parametrize("folder", ["sched", "kv", "text", "spec", "tiers", "disagg"])
def test_no_torch_even_inside_functions(folder: str) -> None:
    """Red when policy reaches for tensors lazily."""
    for path, tree in trees().items():
        if path.startswith(f"quire/{folder}/"):
            found = {module.split(".")[0] for module, _ in imports(tree)}
            assert not found & {"torch", "triton", "transformers"}, path


def test_transformers_is_for_tests_only() -> None:
    """Red when the engine starts to lean on the library it is compared with."""
    for path, tree in trees().items():
        if path == "quire/bench/cpu/transformers_peer.py":
            continue  # the comparison itself
        assert "transformers" not in {m.split(".")[0] for m, _ in imports(tree)}, path


def test_triton_stays_in_kernels() -> None:
    """Red when a file that CPU installs import wants triton, which they do not have."""
    for path, tree in trees().items():
        if not path.startswith(("quire/kernels/", "quire/attn/triton.py")):
            assert "triton" not in {m.split(".")[0] for m, _ in imports(tree)}, path
