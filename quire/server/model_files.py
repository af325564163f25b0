"""ModelFolder: how the API process and the supervisor speak of one model among several.

Small files in the model's folder below the runtime folder, each replaced as a whole. `state` is the
supervisor's word, `want` a wish of the API process, the time of `used` is when a request last named
the model, and that of `worked` when it last worked on a batch. The engine adds its socket, `parked`
when it waits without weights, `home` with the GPU whose memory it can leave and take again,
`failed` with the reason when it could not start, and `short` when that was memory of a GPU.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from quire.server.settings import ServeSettings

SOCKET = "engine.sock"
State = Literal["unloaded", "loading", "ready", "parked", "failed"]
Wish = Literal["load", "fill", "park", "unload"]  # fill: load it where nobody has to go for it
WISHES: tuple[Wish, ...] = ("load", "fill", "park", "unload")
MAX_REASON = 500


class ModelState(msgspec.Struct, frozen=True):
    state: State = "unloaded"
    reason: str = ""  # why it failed, or what it waits for
    memory: int = 0  # bytes of its process, when it was last looked at
    waits_for: tuple[str, ...] = ()  # models that have the memory it needs


class Home(msgspec.Struct, frozen=True):
    """Where an engine has its weights, if it can leave without ending."""

    device: str = ""  # empty: it cannot
    weight_bytes: int = 0


class ModelFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def socket(self) -> Path:
        return self.path / SOCKET

    # ------------------------------------------------------------ supervisor

    def tell(self, state: ModelState) -> None:
        self._write("state", msgspec.json.encode(state))

    def take_wish(self) -> Wish | None:
        try:
            wish = (self.path / "want").read_text()
        except FileNotFoundError:
            return None
        (self.path / "want").unlink(missing_ok=True)
        return next((known for known in WISHES if known == wish), None)

    def idle_s(self) -> float:
        """Since a request last named the model, lines of batches aside."""
        return self._since("used") or 0.0

    def rest_s(self) -> float:
        """Since it was of any use."""
        worked = self._since("worked")
        return self.idle_s() if worked is None else min(self.idle_s(), worked)

    def _since(self, name: str) -> float | None:
        with suppress(FileNotFoundError):
            return max(0.0, time.time() - (self.path / name).stat().st_mtime)
        return None

    def clear(self) -> None:
        """What the last engine left."""
        for name in (SOCKET, "worked", "parked", "home", "failed", "short"):
            (self.path / name).unlink(missing_ok=True)

    def reason(self) -> str:
        with suppress(OSError):
            return (self.path / "failed").read_text()[:MAX_REASON]
        return ""

    @property
    def home(self) -> Home:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self.path / "home").read_bytes(), type=Home)
        return Home()

    @property
    def was_short(self) -> bool:
        """Whether the engine could not start because others have the memory."""
        return (self.path / "short").exists()

    # ------------------------------------------------------------ engine

    @property
    def is_parked(self) -> bool:
        return (self.path / "parked").exists()

    def set_parked(self, is_parked: bool) -> None:
        if is_parked:
            self._write("parked", b"")
        else:
            (self.path / "parked").unlink(missing_ok=True)

    def set_home(self, home: Home) -> None:
        self._write("home", msgspec.json.encode(home))

    def fail(self, reason: str) -> None:
        self._write("failed", reason.encode())

    def set_short(self) -> None:
        self._write("short", b"")

    # ------------------------------------------------------------ API process

    def read(self) -> ModelState:
        try:
            return msgspec.json.decode((self.path / "state").read_bytes(), type=ModelState)
        except (FileNotFoundError, msgspec.MsgspecError):
            return ModelState()

    def ask(self, wish: Wish) -> None:
        self._write("want", wish.encode())

    def ask_softly(self) -> None:
        """For a batch: after what somebody else asked for."""
        if not (self.path / "want").exists():
            self.ask("fill")

    def touch(self) -> None:
        self._write("used", b"")

    def work(self) -> None:
        """Batches have lines in it: not to be ended, but nothing that others wait for."""
        self._write("worked", b"")

    def stop_work(self) -> None:
        (self.path / "worked").unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        made = self.path / f".{name}.{os.getpid()}"
        made.write_bytes(data)
        made.replace(self.path / name)


def folder_of(settings: ServeSettings, index: int) -> ModelFolder:
    """Of one of several models."""
    return ModelFolder(Path(settings.runtime_folder) / f"model-{index}")
