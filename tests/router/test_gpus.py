"""Several servers of one machine divide its GPUs; none of this needs one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs
from quire.errors import NotSupported
from quire.flat_args import args_of
from quire.router import gpus
from quire.router.replicas import Replicas
from quire.router.settings import RouterSettings


def shares(count: int, *, seen: str | None, **args: Any) -> tuple[tuple[str, ...], ...]:
    with pytest.MonkeyPatch.context() as patch:
        if seen is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", seen)
        else:
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return gpus.gpu_shares(count, [args_of(args)])


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four GPUs."""
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)


def test_each_replica_sees_gpus_of_its_own(driver: None) -> None:
    """Red when two replicas compute on the same GPU, or ranks of one replica miss theirs."""
    assert shares(2, seen=None) == (("0",), ("1",))
    assert shares(2, seen=None, tensor_parallel_size=2) == (("0", "1"), ("2", "3"))
    both = {"pipeline_parallel_size": 2, "data_parallel_size": 2}
    assert shares(1, seen=None, **both) == ((),)
    assert shares(4, seen=None, device="cuda:0,cuda:0", tensor_parallel_size=2) == (
        *(("0",), ("1",), ("2",), ("3",)),
    )
    assert shares(2, seen=None, device="cpu") == ((), ())


def test_a_list_is_kept_to(driver: None) -> None:
    """Red when a GPU is used that was hidden, or a name is taken for a number."""
    assert shares(2, seen="3, GPU-ab,MIG-cd") == (("3",), ("GPU-ab",))
    assert shares(2, seen="0,0") == (("0",), ("0",))
    assert shares(2, seen="") == ((), ())  # hidden from everybody
    for seen in ("2", "1,-1,2"):
        with pytest.raises(NotSupported, match=r"got 2 replicas of 1 GPUs each and found 1 GPUs"):
            shares(2, seen=seen)
    with pytest.raises(NotSupported, match=r"replica 0 has 0,0, want 2 different GPUs"):
        shares(2, seen="0,0,1,2", tensor_parallel_size=2)


def test_too_few_are_named(driver: None) -> None:
    """Red when a replica starts that has no GPU."""
    with pytest.raises(NotSupported, match=r"got 3 replicas of 2 GPUs each and found 4.*fewer"):
        shares(3, seen=None, tensor_parallel_size=2)
    with pytest.raises(NotSupported, match=r"found 0 GPUs \(none\).*CUDA_VISIBLE_DEVICES"):
        shares(2, seen="", device="cuda")
    needs = [EngineArgs(device="cpu"), args_of({"pipeline_parallel_size": 4})]
    with pytest.raises(NotSupported, match="got 2 replicas of 4 GPUs each"):
        gpus.gpu_shares(2, needs)


def test_a_container_without_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a node that is no GPU is taken for one, or a machine without any has some."""
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(gpus, "NODES", tmp_path)
    assert shares(2, seen=None) == ((), ())
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert shares(2, seen=None) == (("0",), ("1",))


def test_a_child_sees_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when shares are made and nobody is told."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    made = Replicas((("4",), ("5",)), [], RouterSettings(upstreams=()))
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in made.replicas] == ["4", "5"]
    made = Replicas(((), ()), [], RouterSettings(upstreams=()))
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in made.replicas] == ["4,5", "4,5"]
