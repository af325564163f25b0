"""Which GPU is whose, how ranks on them talk, and what they refuse; there need not be any."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.args_check import check_args
from quire.cli.inspect import inspect
from quire.config import Decision
from quire.dist.devices import carrier_of, places_of
from quire.dist.host import HostLink
from quire.dist.ranks import Ranks
from quire.dist.ring import GlooRing
from quire.dist.stages import Stage
from quire.engine import rank_places as rank_places_module
from quire.engine.rank_graphs import steps_decision, why_by_kernels
from quire.engine.rank_places import rank_decisions, rank_places
from quire.errors import NotSupported
from quire.flat_args import args_of
from quire.models.registry import spec_of
from quire.models.tiny import tiny_model
from quire.models.tiny_configs import tiny_config
from quire.resolve import resolve


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As far as names and numbers of devices go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 34, 1 << 34))
    monkeypatch.setattr(rank_places_module, "maps_memory", lambda one, other: one == other)
    yield


WRONG = [
    ("cuda", 3, "3 ranks on device='cuda' and 2 GPUs.*device='cuda:0,cuda:0,cuda:0'"),
    ("cuda:0", 2, "device='cuda:0' for 2 ranks"),
    ("cuda:0,cuda:2", 2, "cuda:2 is not there, of 2 GPUs"),
    ("cuda:1,cuda:0", 2, "CUDA_VISIBLE_DEVICES=1"),
]


@pytest.mark.parametrize(("asked", "num_ranks", "why"), WRONG)
def test_devices_that_cannot_be_had(asked: str, num_ranks: int, why: str) -> None:
    """Red when ranks are started on a GPU that is not there, or on another than was named."""
    with pytest.raises(NotSupported, match=why):
        places_of(asked, num_ranks, 2)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:0,cpu", "cuda,cuda", ""])
def test_names_of_no_device(name: str) -> None:
    """Red when a misspelt device gets to torch."""
    with pytest.raises(NotSupported, match="a GPU for each rank"):
        check_args(args_of({"device": name}))


def test_how_ranks_on_gpus_talk() -> None:
    """Red when ranks of one GPU are given to NCCL, which refuses them in the middle of a start, or
    memory is mapped where it cannot be."""
    two, one = ("cuda:0", "cuda:1"), ("cuda:0", "cuda:0")

    def at_home(first: str, second: str) -> bool:
        return first == second

    assert carrier_of(two, 2, "shared").name == "nccl"
    assert carrier_of(two, 2, "shared", at_home).name == "nccl"
    assert carrier_of(two, 2, "shared", lambda *_: True).name == "peer"
    assert carrier_of(one, 2, "shared", at_home).name == "peer"
    assert carrier_of(one, 2, "shared") == ("shared", carrier_of(one, 2, "gloo").why)
    assert "several ranks are on cuda:0" in carrier_of(one, 2, "gloo").why
    # Stages talk otherwise, so two of them may be on one GPU beside two on another.
    assert carrier_of((*two, *two), 2, "shared").name == "nccl"
    assert carrier_of((*one, *two), 2, "shared").name == "shared"
    assert carrier_of((*one, "cuda:1", "cuda:1"), 2, "shared", at_home).name == "peer"
    assert carrier_of((*one, *two), 4, "shared", at_home).name == "shared"
    assert carrier_of(two, 1, "gloo", at_home).name == "gloo"


@pytest.mark.usefixtures("two_gpus")
def test_what_was_chosen_is_said() -> None:
    """Red when nobody can see how ranks talk."""
    args = args_of({"device": "cuda:0,cuda:0", "tensor_parallel_size": 2})
    places = rank_places(args)
    said = {d.what: d for d in rank_decisions(args.parallel, places, carrier_of(places, 2, "gloo"))}
    assert said["ranks"].value == "cuda:0, cuda:0"
    assert said["between ranks"].value == "gloo, through memory of the host"
    mapped = carrier_of(places, 2, "gloo", lambda *_: True)
    said = {d.what: d for d in rank_decisions(args.parallel, places, mapped)}
    assert said["between ranks"].value == "memory of GPUs that all have mapped"
    assert rank_places(args_of({"device": "cuda", "tensor_parallel_size": 2})) == (
        "cuda:0",
        "cuda:1",
    )
    assert rank_places(args_of({"device": "cpu", "tensor_parallel_size": 2})) == ()


# family, ranks, why their steps run kernel by kernel
BY_KERNELS = [
    ("llama", Ranks(0, 2), None),
    ("qwen2_moe", Ranks(0, 2), "how many rows an expert gets"),
    ("llama", Ranks(0, 2, has_homes=True), "how many rows a rank attends"),
    ("llama", Ranks(0, 2, stage=Stage(0, 2)), "what a stage sends on"),
]


@pytest.mark.parametrize(("family", "ranks", "why"), BY_KERNELS)
def test_whose_steps_replay_graphs(family: str, ranks: Ranks, why: str | None) -> None:
    """Red when ranks capture a step that waits for the host, or nobody hears why they do not."""
    spec = spec_of(tiny_config(family))
    found = why_by_kernels(ranks, spec, False, True)
    assert found is None if why is None else found is not None and found.startswith(why)
    assert steps_decision(found).value == ("graphs" if why is None else "kernel by kernel")
    assert why_by_kernels(ranks, spec, False, False) is not None, "through memory of the host"
    assert why_by_kernels(ranks, spec, True, True) is not None, "as asked"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_host_memory": 1 << 30}, "kv_host_memory"),
    ({"kv_disk": "somewhere"}, "kv_disk"),
    ({"num_redundant_experts": 2}, "num_redundant_experts=2"),
    ({"nnodes": 2}, "nnodes=2"),
    ({"tensor_parallel_size": 1, "data_parallel_size": 2, "lora": {"a": "b"}}, "lora"),
]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("asked", "what"), REFUSED)
def test_what_ranks_do_on_cpus_alone(asked: dict[str, Any], what: str) -> None:
    """Red when something that ranks on GPUs cannot do is found out while they run."""
    args = args_of({"device": "cuda", "tensor_parallel_size": 2} | asked)
    with pytest.raises(NotSupported, match=f"on GPUs with {what}, which ranks have on CPUs"):
        resolve(args, spec_of(tiny_config("qwen2_moe")))


@pytest.mark.usefixtures("two_gpus")
def test_one_engine_is_on_the_first_gpu() -> None:
    """Red when kernels of an engine run on another GPU than its tensors are on."""
    spec = spec_of(tiny_config("llama"))
    assert resolve(args_of({"device": "cuda:0"}), spec)[1] == torch.device("cuda", 0)
    with pytest.raises(NotSupported, match="CUDA_VISIBLE_DEVICES=1"):
        resolve(args_of({"device": "cuda:1"}), spec)


def test_stages_through_memory_of_the_host(tmp_path: Path) -> None:
    """Red when what a stage sends on has other bits than what it had."""
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def pass_round(index: int) -> torch.Tensor:
        link = HostLink(GlooRing(tmp_path / "meeting", index, 2, 30.0))
        came = torch.empty_like(rows)
        if index == 0:
            link.send(rows)
        link.receive(came)
        if index == 1:
            link.send(came)
        return came

    with ThreadPoolExecutor(2) as pool:
        for came in pool.map(pass_round, range(2)):
            assert came.view(torch.int16).equal(rows.view(torch.int16))


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_told_before_a_start(tmp_path: Path) -> None:
    """Red when ranks that share a GPU are each promised all of it, or nobody says who has which."""
    folder = tiny_model("qwen3", tmp_path)

    def told(device: str) -> dict[str, Decision]:
        args = args_of({"model": str(folder), "device": device, "tensor_parallel_size": 2})
        return {made.what: made for made in inspect(args).decisions}

    apart, shared = told("cuda"), told("cuda:0,cuda:0")
    assert apart["ranks"].value == "cuda:0, cuda:1" and apart["between ranks"].value == "NCCL"
    assert shared["ranks"].value == "cuda:0, cuda:0"
    assert shared["between ranks"].value == "memory of GPUs that all have mapped"
    assert apart["steps"].value == shared["steps"].value == "graphs"
    # 0.9 of 16 GiB
    assert apart["kv cache"].why.startswith("14.40 GiB usable of 16.00 GiB")
    assert shared["kv cache"].why.startswith("7.20 GiB usable of 16.00 GiB")
    with pytest.raises(NotSupported, match="cuda:2 is not there"):
        told("cuda:0,cuda:2")
