"""The longest row that fits into the memory of a rank."""

import pytest

from tk.core.config import parse
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.planning.fit import MemoryLimit
from tk.train.planning.longest_row import longest_row
from tk.train.planning.machines import Machines
from tk.train.planning.planned_run import PlannedRun, prepare_run


def planned(configure: Configure, cp: int) -> PlannedRun:
    model = {"max_position_embeddings": 2**20}
    return prepare_run(parse(configure(model=model, parallel={"cp": cp, "dp": 1}), TrainConfig, "test"), None)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_longest_row_fits_and_a_longer_one_does_not(configure: Configure, on_gpu: bool) -> None:
    run, limit = planned(configure, 1), MemoryLimit(2**28, 2**40, on_gpu)
    longest = longest_row(run, limit, Machines())
    assert longest % 256 == 0
    sizes = []
    for length in (longest, longest + 256):
        other = run.with_rows_of(length)
        sizes.append(other.memory()[0].on_device if on_gpu else other.cpu_memory(other.memory())[0])
    assert sizes[0] <= limit.rank < sizes[1]


def test_ranks_share_a_row(configure: Configure) -> None:
    limit = MemoryLimit(2**28, 2**40, True)
    alone, four = (longest_row(planned(configure, cp), limit, Machines()) for cp in (1, 4))
    assert 3 * alone < four < 4.5 * alone


def test_the_context_of_the_model_is_a_limit_and_a_small_memory_fits_none(configure: Configure) -> None:
    run = planned(configure, 1)
    assert longest_row(run, MemoryLimit(2**50, 2**50, True), Machines()) == 2**20
    assert longest_row(run, MemoryLimit(2**10, 2**40, True), Machines()) == 0
