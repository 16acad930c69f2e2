"""The rows of a micro-batch as one tensor: each stage gets what it needs and nothing else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tk.core.labels import IGNORED
from tk.core.layout import Layout
from tk.data.batches import MicroBatch
from tk.parallel.mesh import Group
from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.tests.train.engine.small_decoders import CPU, LENGTH, make_config, make_mesh, make_stages, micro_batch
from tk.train.engine.row_packer import RowPacker
from tk.train.engine.rows import DealtRows

EXPERTS: dict[str, Any] = {"architecture": "mixtral", "num_local_experts": 4}


def packer(layout: Layout, pp: int = 0, **changes: Any) -> RowPacker:
    """Returns the packer of a pipeline rank."""
    return RowPacker(make_stages(make_config(**changes), make_mesh(layout, pp))[1], CPU)


@pytest.mark.parametrize(
    ("layout", "pp", "changes", "names"),
    [
        (Layout(), 0, {}, ("inputs", "positions", "targets")),
        (Layout(pp=2), 0, {}, ("inputs", "positions")),
        (Layout(pp=2), 1, {}, ("positions", "targets")),
        (Layout(pp=4), 1, {}, ("positions",)),
        (Layout(pp=2, virtual_stages=2), 0, {}, ("inputs", "positions")),
        (Layout(pp=4), 2, EXPERTS, ("positions", "counted")),
    ],
)
def test_a_rank_gets_what_its_stages_need(
    layout: Layout, pp: int, changes: dict[str, Any], names: tuple[str, ...]
) -> None:
    (rows,) = packer(layout, pp, **changes).pack([micro_batch(0)])
    assert rows.names == names
    assert rows.values.shape == (len(names), 2, LENGTH)


def test_values_are_those_of_the_micro_batch() -> None:
    micro = replace(micro_batch(3), documents=(2, 4, 6), first_row=40)
    micro.targets[1] = IGNORED
    (rows,) = packer(Layout(), **EXPERTS).pack([micro])
    found = {name: values.numpy() for name, values in rows.on(CPU).items()}
    for name in ("inputs", "targets", "positions"):
        assert np.array_equal(found[name], getattr(micro, name)), name
    assert found["counted"].tolist() == [[1] * LENGTH, [0] * LENGTH]
    assert (rows.first_row, rows.num_valid, rows.shape) == (40, LENGTH, (2, LENGTH))


def test_a_context_parallel_rank_gets_its_positions_with_their_places() -> None:
    stages = make_stages(make_config(**EXPERTS), make_mesh(Layout()))[1]
    dealt = DealtRows(Group(rank=1, size=2), "gather", [None], 1)
    micro = MicroBatch(np.arange(16).reshape(2, 8), np.arange(1, 17).reshape(2, 8))
    (rows,) = RowPacker(stages, CPU, dealt).pack([micro])
    values = rows.on(CPU)
    assert values["inputs"].shape == values["places"].shape == (2, 4)
    assert torch.equal(values["inputs"] % 8, values["places"])
    assert rows.num_valid == 16, "of whole rows"


def test_only_the_first_call_copies_and_none_waits() -> None:
    with pretend_gpu(pageable=()) as gpu:
        stages = make_stages(make_config(), make_mesh(Layout()))[1]
        (rows,) = RowPacker(stages, GPU).pack([micro_batch(0)])
        first = rows.on(GPU)
        assert rows.on(GPU) is first
        assert len(gpu.copies) == 1
        assert gpu.waits == []
