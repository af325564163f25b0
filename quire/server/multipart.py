"""multipart/form-data out of a file on disk: the small fields as text, the upload as a place in it.

Reads through a memory map, so an upload of any size costs no memory. Takes what browsers and HTTP
clients send; anything else is a 400 that says what is wrong.
"""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path

from quire.server.problems import Problem

MAX_PARTS = 16
MAX_PART_HEAD = 4_096
MAX_TYPE = 300
MAX_FIELD_BYTES = 4_096
_BOUNDARY = re.compile(r"[A-Za-z0-9'()+_,./:=? -]{1,70}")


@dataclass(slots=True)
class Upload:
    """Where the file's bytes are in the body."""

    filename: str
    begin: int
    end: int


@dataclass(slots=True)
class Form:
    fields: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)


def boundary_of(content_type: str) -> bytes:
    """Raises Problem 415 for another type, 400 for a boundary that is none."""
    if len(content_type) > MAX_TYPE:  # parsing a header takes time that grows with its square
        raise Problem(400, f"got a content-type of {len(content_type)} characters")
    kind, found = _parsed("content-type", content_type, "boundary")
    if kind != "multipart/form-data":
        raise Problem(415, f"got content-type {content_type[:80]!r}, want multipart/form-data")
    if not _BOUNDARY.fullmatch(found) or found.endswith(" "):
        raise Problem(400, f"got the multipart boundary {found[:80]!r}, which cannot be one")
    return found.encode("ascii")


def read_form(path: Path, boundary: bytes) -> Form:
    if not path.stat().st_size:
        raise Problem(400, "got an empty body, want multipart/form-data with a file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
        return _read(body, b"--" + boundary)


def _read(body: mmap.mmap, mark: bytes) -> Form:
    form = Form()
    at = 0 if body[: len(mark)] == mark else body.find(b"\r\n" + mark) + 2
    if at == 1:  # found nowhere
        raise _broken("its boundary does not appear")
    for _ in range(MAX_PARTS + 1):
        at += len(mark)
        if body[at : at + 2] == b"--":
            return form
        if body[at : at + 2] != b"\r\n":
            raise _broken("a boundary is not followed by a line break")
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD)
        end = body.find(b"\r\n" + mark, at)
        if head_end < 0 or end < head_end + 4:
            raise _broken("a part has no end")
        _take(form, body, at + 2, head_end, end)
        at = end + 2
    raise _broken(f"it has more than {MAX_PARTS} parts")


def _take(form: Form, body: mmap.mmap, begin: int, head_end: int, end: int) -> None:
    head = body[begin:head_end].decode("utf-8", "replace")
    value = ""
    for line in head.split("\r\n"):
        name, _, rest = line.partition(":")
        if name.strip().lower() == "content-disposition":
            value = rest.strip()
    kind, name = _parsed("content-disposition", value, "name")
    if kind != "form-data" or not name:
        raise _broken("a part has no name")
    _, filename = _parsed("content-disposition", value, "filename")
    start = head_end + 4
    if filename or name == "file":
        form.uploads[name] = Upload(filename or "upload", start, end)
        return
    if end - start > MAX_FIELD_BYTES:
        raise Problem(400, f"the form field {name[:40]!r} has {end - start} bytes", param=name[:40])
    form.fields[name] = body[start:end].decode("utf-8", "replace")


def _parsed(header: str, value: str, param: str) -> tuple[str, str]:
    """A header's value and one of its parameters, "" when it has none."""
    message = Message()
    message[header] = value
    found = message.get_param(param, "", header=header)
    if isinstance(found, tuple):  # RFC 2231: charset, language, text
        found = found[2]
    params = message.get_params([], header=header)
    kind = params[0][0].lower() if params else ""
    return kind, str(found)


def _broken(why: str) -> Problem:
    return Problem(400, f"the multipart body is broken: {why}")
