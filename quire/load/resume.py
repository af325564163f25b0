"""download: a file over HTTP that goes on where an earlier try stopped.

What has arrived lies in `NAME.part`; `NAME.part.json` holds what the server calls that version of
the file, and the digest it is to have. A later try asks for the rest of the very same version. A
server that does not do ranges, or has another version by now, sends it whole and the download
starts over. The digest is checked when all has arrived. Which file to ask for is
`package_index.py`'s.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from quire.errors import CheckpointError, QuireError
from quire.jsonfile import read_object

CHUNK = 1 << 20
TIMEOUT_S, PAUSE_S = 60.0, 1.0
MAX_FRUITLESS = 3  # tries in a row that brought nothing
MAX_RECORD_BYTES = 10_000


class Link(NamedTuple):
    url: str
    filename: str
    sha256: str | None = None


class Interrupted(QuireError):
    """The connection ended before the file did."""


def download(link: Link, folder: Path) -> Path:
    """The file in the folder. What had arrived when it raises stays there for the next call."""
    target, part = folder / link.filename, folder / f"{link.filename}.part"
    if target.is_file():
        return target  # it got its name when it was whole
    fruitless = 0
    while True:
        before = _size(part)
        try:
            _receive(link, part)
            break
        except Interrupted as error:
            fruitless = 0 if _size(part) > before else fruitless + 1
            if fruitless >= MAX_FRUITLESS:
                raise QuireError(
                    f"cannot download {link.filename}: {error}; {_size(part)} bytes are kept, the"
                    " same command goes on from there"
                ) from error
            time.sleep(PAUSE_S * fruitless)
    _check_digest(part, link)
    os.replace(part, target)
    _record_path(part).unlink(missing_ok=True)
    return target


def open_url(
    url: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> http.client.HTTPResponse:
    """With the user name and password that an address may carry. Raises Interrupted."""
    parsed = urllib.parse.urlsplit(url)
    if parsed.scheme not in ("http", "https"):
        raise QuireError(f"got an address of kind {parsed.scheme!r}, want http or https")
    host = parsed.netloc.rpartition("@")[2]
    request = urllib.request.Request(parsed._replace(netloc=host).geturl(), headers=dict(headers))
    if parsed.username is not None:
        login = f"{parsed.username}:{parsed.password or ''}"
        word = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
        # Not for the host that a redirection leads to.
        request.add_unredirected_header("Authorization", f"Basic {word}")
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(_reason(error)) from error
    return response


def _receive(link: Link, part: Path) -> None:
    """Append to the part what is missing, or write it anew."""
    version, sha256 = _kept(part)
    # Without a version only a digest can tell whether the two pieces are of one file.
    start = _size(part) if version or (sha256 and sha256 == link.sha256) else 0
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-"} | ({"If-Range": version} if version else {})
    try:
        response = open_url(link.url, headers)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:
            _forget(part)
            raise Interrupted("the server has no such range of the file") from None
        raise QuireError(
            f"cannot download {link.filename}: the server answers {error.code} {error.reason}"
        ) from None
    with response:
        if response.status == 206 and not _continues(response, start, version):
            _forget(part)
            raise Interrupted("the server sent another range than the one asked for")
        start = start if response.status == 206 else 0
        length = response.length  # of what is sent now; None: not told
        with part.open("r+b" if start else "wb") as out:
            _keep(part, _version(response), link.sha256)
            out.seek(start)
            for chunk in _chunks(response):
                out.write(chunk)
            end = out.tell()
    if length is not None and end < start + length:
        raise Interrupted(f"the connection ended at {end} of {start + length} bytes")


def _chunks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        while chunk := response.read(CHUNK):
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise Interrupted(_reason(error)) from error


def _continues(response: http.client.HTTPResponse, start: int, version: str | None) -> bool:
    """Whether it is the rest of what is there, and of the same version of the file."""
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    return found is not None and int(found[1]) == start > 0 and _version(response) == version


def _version(response: http.client.HTTPResponse) -> str | None:
    """Weak ETags do not promise the same bytes."""
    etag = response.headers.get("ETag")
    is_strong = etag is not None and not etag.startswith("W/")
    return etag if is_strong else response.headers.get("Last-Modified")


def _kept(part: Path) -> tuple[str | None, str | None]:
    """Version and digest of the file that a part is of."""
    try:
        record = read_object(_record_path(part), MAX_RECORD_BYTES)
    except CheckpointError:
        return None, None
    version, sha256 = record.get("version"), record.get("sha256")
    is_text = isinstance(version, str), isinstance(sha256, str)
    return version if is_text[0] else None, sha256 if is_text[1] else None


def _keep(part: Path, version: str | None, sha256: str | None) -> None:
    record = json.dumps({"version": version, "sha256": sha256})
    _record_path(part).write_text(record, encoding="utf-8")


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _record_path(part).unlink(missing_ok=True)


def _check_digest(part: Path, link: Link) -> None:
    if link.sha256 is None:
        return
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != link.sha256:
        _forget(part)
        raise CheckpointError(
            f"{link.filename} has sha256 {found}, its index says {link.sha256}: it was deleted; try"
            " again, and do not trust that index if it happens twice"
        )


def _record_path(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(reason) or type(error).__name__
