"""Registry: lazy, and helpful when a name is wrong."""

from __future__ import annotations

import fractions

import pytest

from quire.errors import NotSupported
from quire.registry import Registry

SHAPES = Registry("shape", {"circle": "fractions:Fraction", "square": "no_such_module:X"})


def test_entries_are_imported_when_asked_for() -> None:
    """Red when building the table imports every entry."""
    assert SHAPES.get("circle") is fractions.Fraction
    assert Registry("module", {"whole": "fractions"}).get("whole") is fractions
    with pytest.raises(ModuleNotFoundError):
        SHAPES.get("square")


def test_a_near_miss_is_suggested() -> None:
    """Red when a typo gets a bare KeyError."""
    with pytest.raises(NotSupported) as caught:
        SHAPES.get("sqare")
    message = str(caught.value)
    assert "unknown shape 'sqare'" in message
    assert "did you mean 'square'?" in message


def test_known_names_are_listed_in_a_readable_sentence() -> None:
    """Red when the list is missing, or runs into the name without a break."""
    with pytest.raises(NotSupported) as caught:
        SHAPES.get("hexagon")
    message = str(caught.value)
    assert "did you mean" not in message
    assert message.endswith("nown: circle, square")
    assert "'hexagon' K" not in message, "the name and the list run into each other"
