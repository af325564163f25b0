"""BatchClient: hands a file to a server on this machine, shows how far it is, fetches the answers.

Runs in a thread beside the server's supervisor and ends it, when all is fetched, with a SIGTERM.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from quire.progress import progress_to

POLL_S = 0.25
FAILED = ("failed", "expired", "cancelled")
DONE = ("completed", "failed", "expired", "cancelled")


class BatchClient(threading.Thread):
    def __init__(
        self, port: int, source: Path, endpoint: str, output: Path, model: str = ""
    ) -> None:
        super().__init__(name="batch-client", daemon=True)
        self.port, self.source, self.endpoint, self.output = port, source, endpoint, output
        self.model = model
        self.failure: str | None = None
        self.is_done = False
        self.summary = ""

    def run(self) -> None:
        try:
            self._wait_ready()
            batch = self._watch(self._found() or self._create())
            self._fetch(batch)
            self.is_done = True
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.failure = f"the batch broke off: {error}"
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    # ------------------------------------------------------------ the batch

    def _found(self) -> dict[str, Any] | None:
        """The batch of an earlier run of the same file."""
        mark = self._mark()
        listed = self._call("GET", "/v1/batches?limit=100")["data"]
        same = (b for b in listed if (b["metadata"] or {}).get("sha256") == mark)
        return next((b for b in same if b["status"] not in FAILED), None)

    def _create(self) -> dict[str, Any]:
        boundary = uuid4().hex
        head = (
            f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="lines"\r\n\r\n'
        )
        body = head.encode() + self.source.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
        kind = f"multipart/form-data; boundary={boundary}"
        file = self._call("POST", "/v1/files", body, kind)
        wish = {
            "input_file_id": file["id"],
            "endpoint": self.endpoint,
            "completion_window": "14d",
            "metadata": {"sha256": self._mark()},
        }
        return self._call("POST", "/v1/batches", json.dumps(wish).encode())

    def _mark(self) -> str:
        """Of the lines and the model: another model's answers are not these."""
        with self.source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(self.model.encode())
        return digest.hexdigest()

    def _watch(self, batch: dict[str, Any]) -> dict[str, Any]:
        with self.source.open("rb") as file:
            num_lines = sum(1 for text in file if text.strip())
        with progress_to("lines", num_lines) as show:
            while batch["status"] not in DONE:
                counts = batch["request_counts"]
                show(counts["completed"] + counts["failed"])
                time.sleep(POLL_S)
                batch = self._call("GET", f"/v1/batches/{batch['id']}")
        if batch["status"] != "completed":
            told = (batch["errors"] or {}).get("data") or [{"message": "no reason was given"}]
            raise ValueError(f"it is {batch['status']}: {told[0]['message']}")
        return batch

    def _fetch(self, batch: dict[str, Any]) -> None:
        counts = batch["request_counts"]
        self.summary = f"{counts['completed']} of {counts['total']} lines: {self.output}"
        errors = self.output.with_suffix(f".errors{self.output.suffix}")
        for file_id, path in (
            (batch["output_file_id"], self.output),
            (batch["error_file_id"], errors),
        ):
            if file_id is not None:
                partial = path.with_name(f".{path.name}.part")
                partial.write_bytes(self._get(f"/v1/files/{file_id}/content"))
                os.replace(partial, path)
        if counts["failed"]:
            self.summary += f"; {counts['failed']} failed: {errors}"

    # ------------------------------------------------------------ HTTP

    def _wait_ready(self) -> None:
        while True:
            try:
                if self._ask("GET", "/ready")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(POLL_S)

    def _call(self, method: str, path: str, body: bytes = b"", kind: str = "") -> dict[str, Any]:
        """A process may be restarting: try for a while."""
        for left in range(240, -1, -1):
            try:
                status, data = self._ask(method, path, body, kind)
            except OSError:
                if not left:
                    raise
            else:
                if status < 400:
                    return dict(json.loads(data))
                if status != 503 or not left:
                    raise ValueError(json.loads(data)["error"]["message"])
            time.sleep(POLL_S)
        raise AssertionError("unreachable")

    def _get(self, path: str) -> bytes:
        status, data = self._ask("GET", path)
        if status != 200:
            raise ValueError(f"{path}: status {status}")
        return data

    def _ask(self, method: str, path: str, body: bytes = b"", kind: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, {"content-type": kind or "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
