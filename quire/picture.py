"""Picture: a figure that is drawn with matplotlib and is there as a whole or not at all.

Where it goes is tried before the work whose picture it is; what a disk refuses later is a sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import BadRequest, NotSupported, QuireError

UNFINISHED = ".unfinished"  # at the end of a name


def pyplot() -> Any:
    """Raises NotSupported where there is nothing to draw with."""
    try:
        import matplotlib

        matplotlib.use("Agg")  # no display needed
        from matplotlib import pyplot
    except ImportError as error:
        raise NotSupported("plots need matplotlib: pip install 'quire[plot]'") from error
    return pyplot


def check_picture(path: Path) -> None:
    """Before what is to be drawn is made. Raises NotSupported, or BadRequest where no file can be
    written."""
    pyplot()
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + UNFINISHED)
        beside.write_bytes(b" ")
        beside.unlink()
    except OSError as error:
        raise BadRequest(
            f"cannot write a picture to {path}: {error.strerror}; give --plot another file",
            param="plot",
        ) from error


def save_picture(figure: Any, path: Path) -> None:
    """As a PNG, and closed. Raises QuireError."""
    beside = path.with_name(path.name + UNFINISHED)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(beside, dpi=120, format="png")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise QuireError(
            f"cannot write {path}: {error.strerror}; nothing but the picture is lost"
        ) from error
    finally:
        pyplot().close(figure)
