"""The native library, compiled on the machine that runs it and kept in the cache folder.

Its name holds a hash of the sources, the flags and the compiler, so a new version never meets an
old file. One process compiles while others wait, into a folder of its own; the finished file is
moved into place. `python -m quire.native.build` compiles ahead; with `--ship` into the package, for
an image that has no compiler. Loading is `library.py`'s.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from quire import env
from quire.errors import NotSupported

SOURCES = Path(__file__).parent / "src"
# No contraction: an operation is fused where the source says so, and nowhere else.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
PLAIN = ("-O2", "-DQUIRE_PLAIN")  # little used and slow to optimise
ARMV8 = "-march=armv8.2-a"
# Copies of the kernels by instruction set, for machines that have more than plain C.
COPIES: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "plain": PLAIN,
        "avx2": AVX2,
        "avxvnni": (*AVX2, "-mavxvnni"),
        "avx512vnni": (*AVX2, *AVX512),
        "amx": (*AVX2, *AVX512, "-mamx-tile", "-mamx-int8"),
    },
    "aarch64": {
        "plain": PLAIN,
        "neon": (),
        "dotprod": (f"{ARMV8}+dotprod",),
        "i8mm": (f"{ARMV8}+dotprod+i8mm",),
    },
}
# Compiled once for each instruction set.
KERNELS = (
    "products.c",
    "float_products.c",
    "rounding.c",
    "expand.c",
    "ops.c",
    "route.c",
    "store.c",
    "attend.c",
    "latents.c",
)
COMMON = (
    *("main.c", "multiply.c", "grouped.c", "experts.c", "adapt.c"),
    *("pool.c", "replay.c", "deal.c", "exchange.c", "scribe.c"),
)
# Compiled alone, into a library of its own: torch loads it by its path.
DEVICE_SOURCE = Path(__file__).parent / "device" / "vault.c"
TIMEOUT_S = 300
DIGEST_BYTES = 32


def find_compiler() -> tuple[str, ...] | None:
    """A command that compiles C: the system's, or the `ziglang` package's."""
    # A Mac's compiler makes code for either kind of Mac; this process is of one.
    target = ("-arch", platform.machine()) if platform.system() == "Darwin" else ()
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return (path, *target)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline")  # not all this CPU has
    return None


def machine() -> str:
    """This machine's name in COPIES; systems have several for one."""
    name = platform.machine()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)


def shipped() -> Path:
    """Where a library that comes with the package is, whichever compiler made it."""
    return SOURCES.parent / f"shipped-{_key(())}.so"


def shipped_device() -> Path:
    return DEVICE_SOURCE.with_name(f"shipped-{_digest([DEVICE_SOURCE.read_bytes()])}.so")


def ensure_built() -> Path:
    """The library's file, compiled if it is not there yet. Raises NotSupported with the reason."""
    if _is_whole(shipped()):
        return shipped()
    compiler = _compiler()
    return _built(f"quire-{_key(compiler)}.so", partial(_compile, compiler))


def ensure_device_built() -> Path:
    """The same for what manages memory of a GPU."""
    source = DEVICE_SOURCE.read_bytes()
    if _is_whole(shipped_device()):
        return shipped_device()
    compiler = _compiler()
    name = f"quire-device-{_digest([source, repr((compiler, FLAGS, machine())).encode()])}.so"
    return _built(name, partial(_compile_device, compiler))


def _compiler() -> tuple[str, ...]:
    compiler = find_compiler()
    if compiler is None:
        raise NotSupported(
            "no C compiler was found (cc, gcc, clang); install one, or `pip install ziglang`"
        )
    return compiler


def _built(name: str, compile_to: Callable[[Path], None]) -> Path:
    """The file of this name in the cache folder, compiled if it is not there yet."""
    cached = env.cache_folder() / "native"
    if _is_whole(cached / name):  # also where nobody may write
        return cached / name
    folder = _writable(cached)
    target = folder / name
    if folder != cached and _is_whole(target):
        return target
    with _locked(folder / "lock"):
        if not _is_whole(target):  # else another process has made it meanwhile
            compile_to(target)
    return target


def _is_whole(path: Path) -> bool:
    """Whether the file is there and ends in its own digest: loading half a library is fatal."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-DIGEST_BYTES:] == hashlib.sha256(content[:-DIGEST_BYTES]).digest()


def _key(compiler: Sequence[str]) -> str:
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    parts += [repr((compiler, FLAGS, COPIES, machine())).encode()]
    return _digest(parts)


def _digest(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _writable(folder: Path) -> Path:
    """The folder, or one of this user alone where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        own = Path(tempfile.gettempdir()) / f"quire-native-{os.getuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o77:
            return own
        return Path(tempfile.mkdtemp(prefix="quire-native-"))  # somebody else's code is not loaded


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, or the process dies
        yield


def _compile(compiler: Sequence[str], target: Path) -> None:
    copies = COPIES.get(machine(), {"plain": PLAIN})
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:

        def make(name: str, *flags: str) -> str:
            made = f"{folder}/{len(flags)}-{flags[0]}-{name}.o"
            if "ziglang" in compiler:
                flags = tuple(flag.replace(ARMV8, "-mcpu=baseline") for flag in flags)
            _run((*compiler, *FLAGS, *flags, "-c", str(SOURCES / name), "-o", made))
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {
                isa: [pool.submit(make, name, f"-DISA={isa}", *flags) for name in KERNELS]
                for isa, flags in copies.items()
            }
            objects = {isa: _results(isa, made) for isa, made in jobs.items()}
            has = [f"-DHAS_{isa}" for isa, made in objects.items() if made and isa != "plain"]
            common = [pool.submit(make, name, "-DQUIRE", *has) for name in COMMON]
            files = [file for made in objects.values() for file in made]
            files += [job.result() for job in common]
        made = f"{folder}/{target.name}"
        _run((*compiler, "-shared", "-o", made, *files, "-lm", "-lpthread"))
        _finish(made, target)


def _compile_device(compiler: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = f"{folder}/{target.name}"
        libraries = ("-ldl", "-lpthread")
        _run((*compiler, *FLAGS, "-shared", "-o", made, str(DEVICE_SOURCE), *libraries))
        _finish(made, target)


def _finish(made: str, target: Path) -> None:
    with open(made, "ab") as file:  # what follows the last section, a loader ignores
        file.write(hashlib.sha256(Path(made).read_bytes()).digest())
    os.replace(made, target)


def _results(isa: str, jobs: Sequence[Future[str]]) -> list[str]:
    """The objects of one copy; none where the compiler does not know the instruction set."""
    try:
        return [job.result() for job in jobs]
    except NotSupported:
        if isa == "plain":
            raise
        return []


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotSupported(f"the C compiler could not be run: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        wrong = next((line for line in lines if "error" in line), lines[0])
        raise NotSupported(f"the C compiler failed: {' '.join(command[:2])} ...: {wrong}")


if __name__ == "__main__":
    try:
        made, device = ensure_built(), ensure_device_built()
        if "--ship" in sys.argv[1:] and made != shipped():
            made = Path(shutil.copyfile(made, shipped()))
        if "--ship" in sys.argv[1:] and device != shipped_device():
            device = Path(shutil.copyfile(device, shipped_device()))
        print(made, device, sep="\n")
    except NotSupported as error:
        print(f"no native library: {error}; CPU engines will be slower")
