"""What can be said about the page's files without a browser."""

from __future__ import annotations

import re

from tests.page.mock_server import PAGE

MAX_BYTES = 168_000
MAX_LINES = 400
FILES = sorted(path for path in PAGE.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".js"]

# Ways for text to become markup or code.
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    r"|setAttribute\(\s*[\"'](style|on\w+)|DOMParser|createContextualFragment"
)


def test_the_page_is_small() -> None:
    """Red when the page outgrows what a slow link loads in a moment."""
    assert sum(path.stat().st_size for path in FILES) < MAX_BYTES
    long = [path.name for path in FILES if len(path.read_text().splitlines()) > MAX_LINES]
    assert long == []


def test_no_text_becomes_markup() -> None:
    """Red when a script starts to parse markup, which is how model text would become live."""
    found = {path.name: SINKS.findall(path.read_text()) for path in SCRIPTS}
    assert {name: hits for name, hits in found.items() if hits} == {}


def test_nothing_inline() -> None:
    """Red when index.html carries what the Content-Security-Policy would refuse."""
    text = (PAGE / "index.html").read_text()
    assert "<style" not in text
    assert re.findall(r"\s(style|on\w+)=", text) == []
    scripts = re.findall(r"<script([^>]*)>([^<]*)</script>", text)
    assert all("src=" in attributes and not body for attributes, body in scripts)


def test_works_offline() -> None:
    """Red when a file comes to need another host."""
    namespace = "http://www.w3.org/2000/svg"
    for path in FILES:
        text = path.read_text().replace(namespace, "")
        assert re.findall(r"(?:src|href|url|import|from|fetch)\W{0,3}https?://", text) == [], path


def test_every_file_is_used_and_exists() -> None:
    """Red when an import names a file that is not there, or a file is left behind."""
    page = (PAGE / "index.html").read_text()
    used = {"index.html", *re.findall(r"\"/page/([^\"]+)\"", page)}
    for path in SCRIPTS:
        used |= set(re.findall(r"from \"\./([^\"]+)\"", path.read_text()))
    assert used == {path.name for path in FILES}
