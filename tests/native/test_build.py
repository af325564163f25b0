"""Compiling the library: once, by one process, and not at all where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.errors import NotSupported
from quire.native import build, library


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What would be run; each writes the file it was told to."""
    seen: list[tuple[str, ...]] = []

    def run(command: tuple[str, ...]) -> None:
        seen.append(tuple(command))
        Path(command[command.index("-o") + 1]).write_text("made")

    monkeypatch.setattr(build, "_run", run)
    monkeypatch.setattr(build, "find_compiler", lambda: ("cc",))
    return seen


def test_it_is_compiled_once(empty_cache: Path, commands: list[tuple[str, ...]]) -> None:
    """Red when every start compiles, or leaves its working files behind."""
    first = build.ensure_built()
    count = len(commands)
    assert count > 2 and first.read_bytes().startswith(b"made")
    assert build.ensure_built() == first and len(commands) == count
    assert {p.name for p in (empty_cache / "native").iterdir()} == {first.name, "lock"}


def test_a_change_of_the_sources_is_another_file(
    empty_cache: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a new version runs an old library."""
    before = build.ensure_built()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.ensure_built() != before


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a read-only cache keeps the engine from starting, or makes each start compile."""
    file = tmp_path / "cache"
    file.write_text("a file where the folder should be")  # root may write anywhere else
    monkeypatch.setenv("QUIRE_CACHE", str(file))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    made = build.ensure_built()
    assert made.read_bytes().startswith(b"made")
    so_far = len(commands)
    assert build.ensure_built() == made and len(commands) == so_far
    made.parent.chmod(0o777)  # anybody could have put a library there
    assert build.ensure_built().parent != made.parent


def test_a_library_in_a_cache_that_cannot_be_written(
    tmp_path: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when what is there is compiled again because nobody may write beside it."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    made = build.ensure_built()
    so_far = len(commands)
    monkeypatch.setattr(build, "_writable", lambda _: pytest.fail("asks for a place to write"))
    assert build.ensure_built() == made and len(commands) == so_far


def test_an_instruction_set_the_compiler_does_not_know_is_left_out(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when one flag of a newer compiler loses the whole library."""
    machine = build.platform.machine()
    if build.find_compiler() is None:
        pytest.skip("no C compiler")
    copies = {"plain": ("-O0",), "avx2": ("-mno-such-instructions",)}
    monkeypatch.setattr(build, "COPIES", {machine: copies})
    assert library.Library(build.ensure_built()).isas == ("plain",)


COPIES = build.COPIES.get(build.machine(), {"plain": build.PLAIN})


@pytest.mark.parametrize("isa", COPIES)
def test_every_copy_compiles(isa: str, tmp_path: Path) -> None:
    """Red when the sources are wrong for one instruction set: it would be left out in silence."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    command = (*compiler, *build.FLAGS, *COPIES[isa], f"-DISA={isa}", "-fsyntax-only")
    empty = tmp_path / "empty.c"
    empty.touch()
    try:
        build._run((*command, str(empty)))
    except NotSupported:
        pytest.skip(f"this compiler does not know {isa}")
    build._run((*command, *(str(build.SOURCES / name) for name in build.KERNELS)))


def test_a_compiler_is_enough() -> None:
    """Red when the sources make no library: engines go on without, and its tests are skipped."""
    if build.find_compiler() is None:
        pytest.skip("no C compiler")
    assert library.open_library().isas[-1] == "plain"


def isas_of(commands: list[tuple[str, ...]]) -> set[str]:
    flags = [flag for command in commands for flag in command]
    return {flag.removeprefix("-DISA=") for flag in flags if flag.startswith("-DISA=")}


@pytest.mark.parametrize(
    ("name", "isas"),
    [
        ("riscv64", {"plain"}),
        ("ppc64le", {"plain"}),
        ("aarch64", {"plain", "neon", "dotprod", "i8mm"}),
        ("arm64", {"plain", "neon", "dotprod", "i8mm"}),
    ],
)
def test_other_machines(
    name: str,
    isas: set[str],
    empty_cache: Path,
    commands: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a machine gets flags of another, or one that nobody thought of gets no library."""
    monkeypatch.setattr(build.platform, "machine", lambda: name)
    build.ensure_built()
    assert isas_of(commands) == isas
    assert not any(flag.startswith("-mavx") for command in commands for flag in command)


def test_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a Mac's compiler is left to choose the architecture: Python may run as the other."""
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert build.find_compiler() == ("/usr/bin/cc", "-arch", "arm64")


def test_zig_compiles_for_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when zig makes every copy for the CPU at hand, as it does when nothing is said."""
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: object())
    assert build.find_compiler() == (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline")


def test_zig_names_arm_features_otherwise(
    empty_cache: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when zig is given flags that it refuses: it would have NEON's oldest instructions."""
    monkeypatch.setattr(build, "find_compiler", lambda: ("python", "-m", "ziglang", "cc"))
    monkeypatch.setattr(build, "machine", lambda: "aarch64")
    build.ensure_built()
    flags = {flag for command in commands for flag in command}
    assert "-mcpu=baseline+dotprod" in flags
    assert not any(flag.startswith("-march") for flag in flags)


def test_without_a_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when its absence is an error and not a reason."""
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(NotSupported, match=r"no C compiler was found.*ziglang"):
        build.ensure_built()
    library.find_library.cache_clear()
    try:
        found = library.find_library()
        assert found.library is None and "no C compiler" in found.reason
    finally:
        library.find_library.cache_clear()


def test_a_compiler_that_fails(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when its message is lost, or half a library is left for the next start."""
    monkeypatch.setattr(build, "find_compiler", lambda: ("false",))
    with pytest.raises(NotSupported, match="the C compiler failed"):
        build.ensure_built()
    assert [p.name for p in (empty_cache / "native").iterdir()] == ["lock"]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b"x" + b[1:]])
def test_a_damaged_file_is_made_anew(
    damage: Callable[[bytes], bytes], empty_cache: Path, commands: list[tuple[str, ...]]
) -> None:
    """Red when a file cut short by a full disk is loaded: that kills the process."""
    path = build.ensure_built()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert build.ensure_built().read_bytes() == whole


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Red when both compile into one file, or one loads what the other has half written."""
    if build.find_compiler() is None:
        pytest.skip("no C compiler")
    script = (
        "from quire.native import build\n"
        "from pathlib import Path\n"
        "runs = []\n"
        "def run(command):\n"
        "    runs.append(command)\n"
        "    Path(command[command.index('-o') + 1]).write_text('made')\n"
        "build._run = run\n"
        "print(build.ensure_built().read_bytes()[:4].decode(), len(runs))\n"
    )
    env = {**os.environ, "QUIRE_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[0].split() for process in both]
    assert [words[0] for words in said] == ["made", "made"]
    assert sorted(int(words[1]) > 0 for words in said) == [False, True]


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a typo in QUIRE_CPU_ISA silently means another one."""
    if build.find_compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("QUIRE_CPU_ISA", "avx9000")
    library.find_library.cache_clear()
    try:
        with pytest.raises(NotSupported, match=r"QUIRE_CPU_ISA='avx9000', this CPU has .*plain"):
            library.find_library()
    finally:
        library.find_library.cache_clear()


def test_a_file_that_is_no_library(
    empty_cache: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a file that the linker refuses ends the process, and not in a reason."""
    library.find_library.cache_clear()
    try:
        found = library.find_library()
        assert found.library is None
        assert found.reason.startswith("the native library cannot be loaded: ")
    finally:
        library.find_library.cache_clear()


def test_a_library_that_comes_with_the_package(
    empty_cache: Path, commands: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an image without a compiler loses its kernels, or runs those of other sources."""
    place = empty_cache / "package" / "shipped.so"
    place.parent.mkdir()
    monkeypatch.setattr(build, "shipped", lambda: place)
    place.write_bytes(build.ensure_built().read_bytes())
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.ensure_built() == place
    place.write_bytes(place.read_bytes()[:-1])  # half a copy is none
    with pytest.raises(NotSupported, match="no C compiler"):
        build.ensure_built()


def test_a_shipped_library_is_of_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a package with new sources loads the library of the old ones."""
    before = build.shipped()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.shipped() != before and build.shipped().parent == build.SOURCES.parent
