"""One transfer for all of a step's integers: what arrives, as what, and where it lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.runner.gather import StepShape
from quire.runner.rows import RequestRows
from quire.runner.upload import Uploader
from quire.step import PageWrite, StepPlan, Work

CPU = torch.device("cpu")


def test_arrays_keep_their_values_and_dtypes() -> None:
    """Red when arrays overlap, when one that is a column of another is packed by its bytes, or
    when an index must be made int64 on the device."""
    columns = np.arange(12, dtype=np.int32).reshape(4, 3)
    arrays = {
        "one": np.asarray([7], np.int32),
        "far": np.asarray([1 << 40, -3], np.int64),
        "none": np.zeros(0, np.int64),
        "column": columns[:, 1],
        "table": columns,
        "last": np.arange(5, dtype=np.int64),
    }
    sent = Uploader(CPU).send(arrays)
    assert list(sent) == list(arrays)
    for name, array in arrays.items():
        assert sent[name].tolist() == array.reshape(-1).tolist(), name
        assert sent[name].dtype == (torch.int32 if array.dtype == np.int32 else torch.int64)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_array_begins_aligned(size: int) -> None:
    """Red when kernels must be compiled again because an array begins anywhere."""
    arrays = {str(i): np.full(size + i, i, (np.int32, np.int64)[i % 2]) for i in range(6)}
    sent = Uploader(CPU).send(arrays)
    first = sent["0"].data_ptr()
    assert all((tensor.data_ptr() - first) % 16 == 0 for tensor in sent.values())


def test_rows_and_positions_lie_where_they_lay_before() -> None:
    """Red when what else is sent moves a graph's inputs, which it would then have to copy."""
    rows = RequestRows(max_rows=8, max_len=64, max_pages=16, device=CPU)
    offsets = set()
    for num_writes in (0, 1, 5):
        works = tuple(Work(i, i, 9, 1, True) for i in range(3))
        writes = tuple(PageWrite(i, 3, i + 1) for i in range(num_writes))
        arrays: dict[str, np.ndarray] = {}
        StepShape(works, spare_row=8, pad_to=4).stage(arrays)
        rows.stage(StepPlan(works, (), writes), arrays)
        sent = Uploader(CPU).send(arrays)
        start = sent["rows"].untyped_storage().data_ptr()
        offsets.add((sent["rows"].data_ptr() - start, sent["positions"].data_ptr() - start))
        assert sent["rows"].tolist() == [0, 1, 2, 8]
    assert offsets == {(0, 16)}


def test_an_odd_dtype_is_refused() -> None:
    with pytest.raises(AssertionError, match="float64"):
        Uploader(CPU).send({"x": np.zeros(2)})
