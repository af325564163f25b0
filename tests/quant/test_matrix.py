"""Every format of weights, with everything the engine does to requests. Red when a format's bits
depend on the batch, on chunks, on cached prefixes, on drafts or on lost pages, in any model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quant.matrix import check, chosen, folder_of


@pytest.mark.parametrize("form, family, drafts", chosen())
def test_alone_and_in_a_crowd(form: str, family: str, drafts: bool, tmp_path: Path) -> None:
    folder, how = folder_of(form, family, tmp_path)
    check(folder, drafts, device="cpu", **how)
