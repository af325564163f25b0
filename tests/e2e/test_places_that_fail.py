"""A full disk, a home nobody may write to, a clock that jumps: the server goes on through each."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage

import pytest

from quire.native.build import ensure_built
from tests.e2e.harness import Served, wait_until
from tests.e2e.raw import StreamClient
from tests.tiny_folder import write_tiny_folder

FLAGS = ("--device", "cpu", "--load-format", "dummy", "--threads", "1")
MULTIPART = {"content-type": "multipart/form-data; boundary=x"}
DAY_S = 86_400


def upload(size: int) -> bytes:
    head = '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    return head.encode() + b"x" * size + b"\r\n--x--\r\n"


@contextmanager
def mounted(at: Path, options: str) -> Iterator[None]:
    """A file system of its own, where this user may have one."""
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode:
        pytest.skip(f"no mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=4_096)


def test_a_full_disk_costs_the_file_that_does_not_fit_alone(model: Path, tmp_path: Path) -> None:
    """Red when a full store breaks answers, keeps half a file, or stays broken with room again."""
    with (
        mounted(tmp_path, "size=1m"),
        Served(model, *FLAGS, "--store", str(tmp_path / "store")) as served,
    ):
        status, told = served.call("POST", "/v1/files", upload(3_000_000), MULTIPART)
        assert status == 507 and "space" in told["error"]["message"]
        # What did not fit is removed before the disk is filled up, or there would be room again.
        wait_until(lambda: disk_usage(tmp_path).free > 600_000, 10, "no half of a file is left")
        ballast = tmp_path / "ballast"
        with pytest.raises(OSError, match="space"):
            ballast.write_bytes(b"x" * 2_000_000)
        assert served.call("POST", "/v1/files", upload(400_000), MULTIPART)[0] >= 500
        assert served.complete()[0] == 200
        assert served.get("/v1/files")[1]["data"] == []
        ballast.unlink()
        assert served.call("POST", "/v1/files", upload(400_000), MULTIPART)[0] == 200
        assert served.get("/ready")[0] == 200


def test_a_home_that_is_read_only(model: Path, tmp_path: Path) -> None:
    """Red when something must be written under the home before a model can be served."""
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "", "QUIRE_CACHE": ""}
    with mounted(tmp_path, "size=64m"):
        library = ensure_built()
        kept = tmp_path / ".cache" / "quire" / "native"
        kept.mkdir(parents=True)
        (kept / library.name).write_bytes(library.read_bytes())
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with Served(model, *FLAGS, "--no-store", env=env) as served:
            assert served.complete()[0] == 200


def test_a_clock_that_jumps(model: Path, tmp_path: Path) -> None:
    """Red when a deadline, a queue or a heartbeat follows the wall clock."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n"
        "true_time = time.time\n"
        f"time.time = lambda: true_time() + float(open({str(offset)!r}).read() or 0)\n"
    )
    body = {"prompt": "hello", "max_tokens": 1_500, "ignore_eos": True, "timeout": 60}

    async def streams(served: Served) -> list[StreamClient]:
        clients = [StreamClient(served.port, "/v1/completions", body) for _ in range(4)]
        tasks = [asyncio.ensure_future(client.run()) for client in clients]
        for days in (1, -1, 400, 0):
            while any(client.seen.num_events < 5 for client in clients):
                await asyncio.sleep(0.02)
            offset.write_text(str(days * DAY_S))
            assert (await asyncio.to_thread(served.complete))[0] == 200
        await asyncio.gather(*tasks)
        return clients

    flags = ("--queue-timeout", "30")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Served(model, *FLAGS, *flags, env={"PYTHONPATH": paths}) as served:
        engine = served.engine.pid
        clients = asyncio.run(streams(served))
        assert [client.seen.errors for client in clients] == [[], [], [], []]
        assert all(client.seen.is_done for client in clients)
        assert served.engine.pid == engine and served.is_ready()
        served.wait_idle()
