"""A decode step's edges on a real GPU: inputs in one kernel, draws stored by the one that makes
them, and nothing launched in between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import numpy as np

from quire.kernels.sample import DrawArgs, draw
from quire.kernels.step_inputs import step_inputs
from quire.runner.gather import StepShape, decode_batches, fed_tokens, ragged_batches
from quire.runner.graphs import GraphCache
from quire.runner.rows import RequestRows
from quire.runner.upload import ROOM, Uploader
from quire.step import Work
from tests.gpu.test_engine_gpu import engine_of, make, model_of, prompts
from tests.runner.launches import Launches, counted

DEVICE = torch.device("cuda")
MANY = 1 << 30  # cells of a row: the third one begins beyond 31 bits


def same_rows(num_groups: int, max_rows: int = 300) -> tuple[RequestRows, RequestRows]:
    """The same tables on both devices."""
    made = [
        RequestRows(max_rows, 500, 40, device, num_groups)
        for device in (torch.device("cpu"), DEVICE)
    ]
    made[0].tokens.random_(0, 2**31 - 1)
    made[0].page_tables.random_(0, 2**31 - 1)
    made[1].tokens.copy_(made[0].tokens)
    made[1].page_tables.copy_(made[0].page_tables)
    return made[0], made[1]


@pytest.mark.parametrize("num_groups", [1, 3])
def test_same_as_torch(num_groups: int) -> None:
    """Red when the compiled kernel, or one kept from a launch of another size, looks elsewhere."""
    host, device = same_rows(num_groups)
    for num_tokens in (1, 2, 16, 7, 256, 257, 5000, 1):
        for shift in (0, 1):
            sent = torch.randint(0, 300, (2, num_tokens + 1), dtype=torch.int32)
            row_ids, positions = sent[0, shift:], sent[1, shift:]
            got = fed_tokens(device, row_ids.to(DEVICE), sent.to(DEVICE)[1, shift:], 16)
            want = fed_tokens(host, row_ids, positions, 16)
            for name, tensor in want._asdict().items():
                assert torch.equal(getattr(got, name).cpu(), tensor), (name, num_tokens, shift)


def test_tables_beyond_31_bits() -> None:
    """Red when a cell's place is computed in 32 bits, in the inputs or in the draw."""
    tokens = torch.zeros(3, MANY + 5, dtype=torch.int32, device=DEVICE)
    tokens[2, MANY] = 1234
    row, position = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (2, MANY))
    pages = torch.full((1, 3, 2 * MANY // 1024), 9, dtype=torch.int32, device=DEVICE)
    got = step_inputs(row, position, tokens, pages, 1024)
    assert got.input_ids.tolist() == [1234] and got.slots.tolist() == [[9 * 1024]]
    logits = torch.zeros(1, 100, device=DEVICE)
    logits[0, 77] = 1.0
    zeros, ones = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    args = DrawArgs(zeros, zeros.long(), position, zeros.long(), ones, zeros, False, row, tokens)
    assert draw(logits, args).tolist() == [77] and int(tokens[2, MANY]) == 77
    assert int(tokens.sum()) == 77


def test_batches_launch_nothing_of_torchs() -> None:
    """Red when a conversion or a gather comes back beside the kernel."""
    _, rows = same_rows(num_groups=2)
    uploader = Uploader(DEVICE)
    for works in ([Work(i, i, 30 + i, 1, True) for i in range(20)], [Work(0, 5, 3, 70, True)]):
        shape = StepShape(tuple(works), spare_row=300)
        arrays: dict[str, np.ndarray] = {}
        shape.stage(arrays)
        with Launches() as launches:
            sent = uploader.send(arrays)
            assert counted(launches) == ["copy_"]
            if shape.is_decode:
                decode_batches(rows, sent["rows"], sent["positions"], 16, shape.context_lens)
            else:
                ragged_batches(rows, shape, sent, 16)
            assert counted(launches) == []


def test_uploads_larger_than_their_place() -> None:
    """Red when a long prompt's upload is cut, or moves what a graph reads at its place."""
    uploader = Uploader(DEVICE)
    small = uploader.send({"rows": np.arange(9, dtype=np.int32)})
    assert small["rows"].tolist() == list(range(9))
    large = uploader.send(
        {"rows": np.arange(9, dtype=np.int32) + 1, "at": np.arange(ROOM, dtype=np.int64)}
    )
    assert large["rows"].tolist() == list(range(1, 10)) and large["at"].tolist()[-1] == ROOM - 1
    assert large["rows"].data_ptr() == small["rows"].data_ptr()


def test_a_graph_reads_its_inputs_where_they_lie() -> None:
    """Red when a replay sees an earlier step's inputs, or copies those already in place."""

    def step(rows: Tensor, positions: Tensor, *bounds: object) -> Tensor:
        return (rows * 1000 + positions).float()

    graphs = GraphCache(step, max_batch=8, max_context=64, spare_row=8)
    place = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    for shift in range(4):
        place.copy_(torch.arange(8) + shift)
        is_elsewhere = shift == 2
        given = place + 50 if is_elsewhere else place
        want = (given[:4] * 1000 + given[4:]).float()
        with Launches() as launches:
            got = graphs.replay(given[:4], given[4:], longest=10)
            names = counted(launches)
        assert torch.equal(got, want)
        if shift:
            assert names == (["copy_"] * 2 if is_elsewhere else [])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [1, 8])
def test_a_decode_step_is_two_copies_around_a_graph(temperature: float, count: int) -> None:
    """Red when anything of torch's runs in a decode step but the upload, the download, and the
    write of pages in steps that take some."""
    engine = engine_of(model_of("llama"))
    for i, prompt in enumerate(prompts(count, seed=3)):
        engine.core.add(make(i, prompt, 80, temperature))
    for _ in range(20):  # prompts are read, graphs captured
        engine.core.step()
    seen = []
    with Launches() as launches:
        for _ in range(20):
            engine.core.step()
            seen.append(counted(launches))
    while engine.core.has_work:
        engine.core.step()
    assert ["copy_", "copy_"] in seen
    with_pages = ["copy_", "index_copy_", "copy_"]
    assert all(names in (["copy_", "copy_"], with_pages) for names in seen), seen
