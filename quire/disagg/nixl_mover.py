"""NixlMover: pages by one-sided reads through NIXL (UCX over shared memory, TCP or RDMA).

The lender gathers its pages in one piece of memory, registers it and says where it is; the taker
reads it without the lender doing anything. Only numbers and bytes cross: NIXL's own description of
an agent, an address, digests. A read cannot be called back, so memory that one was started into is
kept until the read has ended, however long that takes. The `nixl` extra brings the library.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.disagg import frames
from quire.disagg.connector import Alive, Lent
from quire.errors import NotSupported, TransferError
from quire.kv.tier_index import Wanted
from quire.tiers.segment import Sealer

READ_S = 60.0  # the longest that a read may take
POLL_S = 0.0005
MAX_DESCRIPTION = 1 << 20
MAX_NODES = 1 << 20
_SPOT = struct.Struct("<QQI")  # address, bytes, bytes of the agent's description
_ENTRY = frames.KEY_BYTES + frames.DIGEST_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A read that was started, and what it needs as long as it runs."""

    handle: Any
    region: Any
    peer: str
    data: bytearray


class NixlMover:
    def __init__(self, sealer: Sealer, node_bytes: int) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError:
            raise NotSupported(
                "got kv_transport='nixl', but the library is not installed; run"
                " pip install 'quire[nixl]', or leave it at 'sockets'"
            ) from None
        self._sealer, self._node_bytes = sealer, node_bytes
        self._lock = threading.Lock()  # the agent is used by one thread at a time
        name = f"quire-{os.getpid()}-{secrets.token_hex(4)}"
        self._agent: Any = nixl_agent(name, nixl_agent_config())
        self._unfinished: list[_Read] = []  # cannot be called back

    # ------------------------------------------------------------ the side that has pages

    def give(self, connection: socket.socket, lent: Sequence[Lent], is_alive: Alive) -> None:
        gathered = np.frombuffer(bytearray().join(one.landed() for one in lent) or b"\0", np.uint8)
        seals = b"".join(
            node.key + self._sealer.digest(node.key, node.tokens, data) for node, data, _, _ in lent
        )
        region = self._register(gathered)
        try:
            with self._lock:
                description = self._agent.get_agent_metadata()
            size = sum(len(one.data) for one in lent)
            spot = _SPOT.pack(gathered.ctypes.data, size, len(description))
            frames.send(connection, frames.SPOT, spot, description, seals)
            frames.receive(connection, frames.END, 0)  # it has read, or will not
        finally:
            self._deregister(region)

    # ------------------------------------------------------------ the side that wants them

    def take(
        self, connection: socket.socket, wanted: Sequence[Wanted], is_alive: Alive
    ) -> dict[bytes, bytearray]:
        most = _SPOT.size + MAX_DESCRIPTION + MAX_NODES * _ENTRY
        body = bytes(frames.receive(connection, frames.SPOT, most))
        address, size, length = _SPOT.unpack_from(body)
        description = body[_SPOT.size : _SPOT.size + length]
        seals = body[_SPOT.size + length :]
        if size != len(seals) // _ENTRY * self._node_bytes or len(seals) % _ENTRY:
            raise TransferError(f"got {size} bytes and {len(seals)} bytes of digests")
        data = self._read(description, address, size, is_alive) if size else bytearray()
        frames.send(connection, frames.END)
        return self._proved(data, seals, dict(wanted))

    def _proved(
        self, data: bytearray, seals: bytes, tokens_of: dict[bytes, bytes]
    ) -> dict[bytes, bytearray]:
        taken = {}
        for index in range(len(seals) // _ENTRY):
            entry = seals[index * _ENTRY : (index + 1) * _ENTRY]
            key, seal = entry[: frames.KEY_BYTES], entry[frames.KEY_BYTES :]
            if key not in tokens_of:
                continue
            page = data[index * self._node_bytes : (index + 1) * self._node_bytes]
            if not hmac.compare_digest(seal, self._sealer.digest(key, tokens_of[key], page)):
                raise TransferError("a page came damaged, or of other tokens")
            taken[key] = page
        return taken

    def _read(self, description: bytes, address: int, size: int, is_alive: Alive) -> bytearray:
        data = bytearray(size)
        local = np.frombuffer(data, np.uint8)
        region, read = self._register(local), None
        try:
            with self._lock:
                peer = self._agent.add_remote_agent(description)
                here = self._agent.get_xfer_descs([(local.ctypes.data, size, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(address, size, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", here, there, peer)
                read = _Read(handle, region, peer, data)
                state = self._agent.transfer(handle)
            state = self._wait(handle, state, is_alive)
        except Exception as error:  # the library has a class of its own for each of its faults
            self._end(read) if read is not None else self._deregister(region)
            raise TransferError(f"NIXL could not read: {type(error).__name__}: {error}") from error
        self._end(read)
        if state != "DONE":
            raise TransferError(f"NIXL has not read, its state is {state}")
        return data

    def _wait(self, handle: Any, state: str, is_alive: Alive) -> str:
        deadline = time.monotonic() + READ_S
        while state == "PROC" and time.monotonic() < deadline and is_alive():
            time.sleep(POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
        return state

    # ------------------------------------------------------------ memory

    def _register(self, memory: Any) -> Any:
        self._bury()
        try:
            with self._lock:
                entry = (memory.ctypes.data, memory.nbytes, 0, "")
                return self._agent.register_memory([entry], "DRAM")
        except Exception as error:
            raise TransferError(f"NIXL cannot register memory: {error}") from error

    def _deregister(self, region: Any) -> None:
        with self._lock:
            self._agent.deregister_memory(region)

    def _end(self, read: _Read) -> None:
        """Let go of a read, now or when it has ended by itself."""
        self._unfinished.append(read)
        self._bury()

    def _bury(self) -> None:
        for read in list(self._unfinished):
            with self._lock:
                if self._state(read) == "PROC":
                    continue
                self._agent.release_xfer_handle(read.handle)
                self._agent.remove_remote_agent(read.peer)
                self._agent.deregister_memory(read.region)
            self._unfinished.remove(read)

    def _state(self, read: _Read) -> str:
        try:
            return str(self._agent.check_xfer_state(read.handle))
        except Exception as error:
            if type(error).__module__.startswith("nixl"):
                return "ERR"  # over, one way or another
            raise

    def close(self) -> None:
        """The agent goes with this object; reads that run on keep their memory until then."""
