"""Packs in the cache folder: the same bits as packed anew, and never those of another file."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams, env
from quire.engine import pack_identity
from quire.errors import NotSupported
from quire.load.safetensors_checkpoint import SafetensorsCheckpoint
from quire.load.wish import Wish
from quire.models.tiny import tiny_model
from quire.native import pack_file, packs
from quire.native.library import Library
from quire.native.panels import Panels
from quire.quant.deferred import Deferred
from quire.quant.rtn import RtnForm

SMALL = {"device": "cpu", "num_threads": 1, "max_model_len": 64, "kv_cache_memory": 1 << 22}
FORM = "rtn-int4-g32"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Library) -> Path:
    """With the library that is compiled already; tiny models count, and files settle at once."""
    monkeypatch.setattr("quire.env.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(packs, "LEAST_BYTES", 1)
    monkeypatch.setattr(pack_identity, "SETTLED_S", -1e9)
    return tmp_path / "cache" / "packs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path / "model", seed=3, tokenizer=False)


def start(folder: Path, **more: object) -> LLM:
    args = {**SMALL, "quantization": FORM, **more}
    return LLM(str(folder), skip_tokenizer_init=True, **args)  # type: ignore[arg-type]


def answer(llm: LLM) -> list[tuple[int, float]]:
    wish = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=1)
    out = llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, wish, use_tqdm=False)[0].outputs[0]
    return [(t, at[t].logprob) for t, at in zip(out.token_ids, out.logprobs or (), strict=True)]


def note(llm: LLM) -> str:
    return next(d.why for d in llm.decisions if d.what == "weights")


def the_pack(own_cache: Path) -> Path:
    (path,) = own_cache.glob("*.pack")
    return path


def test_the_next_start_maps_it(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a mapped start reads or packs a weight, or has other bits, form or memory."""
    first = start(folder)
    assert "packed now, mapped at the next start" in note(first)
    want = answer(first)

    def never(*args: object) -> None:
        raise AssertionError("a weight was packed again")

    monkeypatch.setattr("quire.native.linear.pack", never)
    monkeypatch.setattr("quire.load.loader.Source.weight", never)
    second = start(folder)
    assert f"mapped from {the_pack(own_cache)}" in note(second)
    assert answer(second) == want
    said = [{d.what: d.value for d in llm.decisions}["weights"] for llm in (first, second)]
    assert said[0] == said[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "gemma2", "gpt2"])
def test_every_kind_of_weight(family: str, tmp_path: Path, own_cache: Path) -> None:
    """Red when experts, permuted or transposed weights or biases get each other's names."""
    folder = tiny_model(family, tmp_path / family, seed=1, tokenizer=False)
    without = answer(start(folder, quantization=None, dtype="auto"))
    assert answer(start(folder, quantization=None, dtype="auto")) == without
    rounded = [answer(start(folder)) for _ in range(2)]
    assert rounded[0] == rounded[1]


def test_another_form_or_file_is_another_pack(
    folder: Path, own_cache: Path, tmp_path: Path
) -> None:
    """Red when a changed file, form or config meets a pack of what was there before."""
    before = answer(start(folder))
    assert "packed now" in note(start(folder, quantization="rtn-int8-g32"))
    weights = folder / "model.safetensors"
    whole, times = weights.read_bytes(), weights.stat()
    at = len(whole) // 2  # the second half is weights: the same size, and the times put back
    weights.write_bytes(whole[:at] + bytes(len(whole) - at))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = start(folder)
    assert "packed now" in note(changed) and answer(changed) != before
    assert len(list(own_cache.glob("*.pack"))) == 3


def test_what_else_decides_the_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, wish = SafetensorsCheckpoint.open(folder), Wish(True)
    identity = pack_identity.identity_of
    first = identity(checkpoint, wish)
    assert first == identity(checkpoint, wish)
    assert first != identity(checkpoint, replace(wish, form=RtnForm(4, 32)))
    checkpoint.config = {**checkpoint.config, "rope_theta": 5.0}
    assert first != identity(checkpoint, wish)
    checkpoint = SafetensorsCheckpoint.open(folder)
    monkeypatch.setattr(pack_identity, "SOURCES", ("quant",))
    assert first != identity(checkpoint, wish), "our own sources have a say"
    monkeypatch.setattr(pack_identity, "SETTLED_S", 60.0)
    assert identity(checkpoint, wish) is None, "a file of this minute may change unseen"


def test_changed_while_it_was_read(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when weights of an older file are kept under the name of a newer one."""
    save = packs.Packs.save

    def touched(self: packs.Packs) -> None:
        os.utime(folder / "model.safetensors")
        save(self)

    monkeypatch.setattr(packs.Packs, "save", touched)
    assert "not kept: the model's files changed meanwhile" in note(start(folder))
    assert not list(own_cache.glob("*.pack"))


def flipped(content: bytes) -> bytes:
    return content[:-7] + bytes([content[-7] ^ 1]) + content[-6:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-1],
    "empty": lambda content: b"",
    "header": lambda content: content[:100] + b"x" + content[101:],
    "magic": lambda content: b"x" + content[1:],
    "end": flipped,
    "zeros": lambda content: content[:4096] + bytes(len(content) - 4096),
    "longer": lambda content: content + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pack_is_made_anew(damage: str, folder: Path, own_cache: Path) -> None:
    """Red when a file that a crash cut short is multiplied with, or stays in the way."""
    want = answer(start(folder))
    path = the_pack(own_cache)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    again = start(folder)
    assert "mapped from" not in note(again) and answer(again) == want
    assert "mapped from" in note(start(folder))


def test_a_full_disk(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an engine does not start for want of room, or leaves half a file."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packs, "write_pack", full)
    llm = start(folder)
    assert "not kept: No space left on device" in note(llm) and answer(llm)
    assert [path.name for path in own_cache.iterdir()] == ["lock"]
    monkeypatch.setattr(packs, "_check_disk", full)
    assert "not kept: No space left" in note(start(folder))


def test_a_folder_that_cannot_be_written(folder: Path, own_cache: Path) -> None:
    own_cache.parent.mkdir()
    own_cache.write_text("a file where the folder should be")  # root may write anywhere else
    llm = start(folder)
    assert "packed now; not kept: " in note(llm) and answer(llm)


def test_the_limit(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when 0 still writes, or a pack larger than all may be is written."""
    monkeypatch.setenv("QUIRE_PACK_GIB", "0")
    assert note(start(folder)).endswith("packed now") and not own_cache.exists()
    monkeypatch.setenv("QUIRE_PACK_GIB", "0.00000001")
    assert "(QUIRE_PACK_GIB)" in note(start(folder))
    for wrong in ("much", "-1", "nan"):
        monkeypatch.setenv("QUIRE_PACK_GIB", wrong)
        with pytest.raises(NotSupported, match=r"got QUIRE_PACK_GIB=.* want a number of GiB"):
            env.pack_limit()


def test_packs_used_longest_ago_make_room(tmp_path: Path) -> None:
    """Red when the folder grows without end, or the newest goes first."""
    shelf = packs.Shelf(tmp_path, limit=100)
    now = packs.time.time()
    for age, name in enumerate(("new", "middle", "old")):
        (tmp_path / f"{name}.pack").write_bytes(bytes(30))
        os.utime(tmp_path / f"{name}.pack", (now - 60 * age,) * 2)
    (tmp_path / "left.part").write_bytes(b"x")
    (tmp_path / "other").write_bytes(bytes(500))
    shelf.make_room(35, tmp_path / "none.pack")
    assert {p.name for p in tmp_path.iterdir()} == {"new.pack", "middle.pack", "other"}
    os.utime(tmp_path / "middle.pack", (now - packs.MAX_AGE_S - 60,) * 2)
    shelf.make_room(1, tmp_path / "none.pack")
    assert {p.name for p in tmp_path.iterdir()} == {"new.pack", "other"}


def panels() -> Panels:
    return Panels.of([torch.arange(64, dtype=torch.uint8)] + [None] * 8, range(9))


def _write_one(folder: str, barrier: Any, notes: Any) -> None:
    made = packs.Packs(packs.Shelf(Path(folder), 1 << 30), "m", lambda: "a" * 32)
    made.add("w", [panels()])
    packs.LEAST_BYTES = 1
    barrier.wait()
    made.save()
    notes.put(made.note)


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Red when both write, or one maps what the other has half written."""
    forked = multiprocessing.get_context("fork")
    barrier, notes = forked.Barrier(2), forked.Queue()
    both = [forked.Process(target=_write_one, args=(tmp_path, barrier, notes)) for _ in range(2)]
    for process in both:
        process.start()
    said = [notes.get(timeout=30) for _ in both]
    for process in both:
        process.join()
    assert all("mapped at the next start" in n or "another process" in n for n in said), said
    (found,) = pack_file.PackFile.open(the_pack(tmp_path)).find("w") or ()
    codes = found.tensors[0]
    assert codes is not None and torch.equal(codes, torch.arange(64, dtype=torch.uint8))


def test_somebody_else_is_writing(tmp_path: Path) -> None:
    shelf = packs.Shelf(tmp_path, 1 << 30)
    with shelf.locked() as first, shelf.locked() as second:
        assert first and not second


def test_a_weight_is_made_when_it_is_asked_for() -> None:
    """Red when naming, counting or reordering a weight reads it."""
    form, calls = RtnForm.parse(FORM), []

    def make() -> Any:
        calls.append(1)
        return form.of(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))

    weight = Deferred("w", (8, 64), make)
    turned = weight.pick(torch.tensor([3, 1]))
    assert turned.shape == (2, 64) and turned.name != weight.name and not calls
    assert torch.equal(turned.dequantize(), make().dequantize()[[3, 1]])
