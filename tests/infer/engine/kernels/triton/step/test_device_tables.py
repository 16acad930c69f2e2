"""Columns on the device: one copy for all of them, and the memory of buckets."""

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.triton.step.device_tables import DecodeTables, RowOptions, send_columns
from tk.infer.engine.kernels.triton.step.step_columns import DECODE_COLUMNS, FLOAT_COLUMNS

CPU = torch.device("cpu")


def test_columns_arrive_as_they_were_sent() -> None:
    first = send_columns({"a": np.array([1, 2], np.int32), "b": np.empty(0, np.int32)}, CPU)
    second = send_columns({"a": np.arange(100, dtype=np.int32).reshape(4, 25)[:, :3]}, CPU)
    assert (first["a"].tolist(), first["b"].tolist()) == ([1, 2], [])
    assert second["a"].tolist() == [row * 25 + column for row in range(4) for column in range(3)]


def test_each_column_begins_at_a_multiple_of_16_bytes() -> None:
    """Triton compiles kernels anew for pointers that do not: a step of other lengths would wait for that."""
    sizes = (1, 4, 6, 0, 3)
    found = send_columns({str(i): np.full(size, i, np.int32) for i, size in enumerate(sizes)}, CPU)
    assert [each.tolist() for each in found.values()] == [[i] * size for i, size in enumerate(sizes)]
    assert {(each.data_ptr() - found["0"].data_ptr()) % 16 for each in found.values()} == {0}
    columns = DecodeTables(1, 3, CPU).columns(1)
    assert {(line.data_ptr() - columns.data_ptr()) % 16 for line in columns} == {0}


def test_numbers_of_other_sizes_are_refused() -> None:
    with pytest.raises(TypeError):
        send_columns({"a": np.zeros(2, np.int64)}, CPU)


def test_a_bucket_keeps_the_tables_that_no_plan_replaces() -> None:
    tables = DecodeTables(4, 3, CPU)
    columns = torch.arange(2 * len(DECODE_COLUMNS), dtype=torch.int32).view(-1, 2)
    tables.put(columns, torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    tables.put(columns + 1, None)
    assert tables.columns(2).tolist() == (columns + 1).tolist()
    assert tables.tables(2).tolist() == [[1, 2, 0], [3, 4, 0]]
    assert tables.columns(4)[1].tolist()[2:] == [-1, -1], "padding stands nowhere before a plan comes"


def test_options_of_rows_are_the_bits_of_their_columns() -> None:
    columns = {name: torch.tensor([i, i + 1], dtype=torch.int32) for i, name in enumerate(DECODE_COLUMNS)}
    for name in FLOAT_COLUMNS:
        columns[name] = torch.tensor([0.25, 2.0]).view(torch.int32)
    options = RowOptions.of(columns)
    assert [options.columns[name].tolist() for name in FLOAT_COLUMNS] == [[0.25, 2.0]] * len(FLOAT_COLUMNS)
    part = options.part(slice(1, 2))
    found = {name: each.tolist() for name, each in part.columns.items()}
    assert (found["temperature"], found["seed_low"], found["new_number"]) == ([2.0], [5], [8])
