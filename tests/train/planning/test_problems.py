"""Sizes that cannot be planned are refused together, before a table of tensors or a schedule is made of them."""

from typing import Any

import pytest

from tk.core.config import parse
from tk.core.errors import ParallelError
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.planning.problems import MOST_PASSES, refuse, size_problems


def found(configure: Configure, num_ranks: int | None = None, **sections: dict[str, Any]) -> list[str]:
    config = parse(configure(**sections), TrainConfig, "test")
    return size_problems(config, config.model, num_ranks)


def test_each_size_is_refused_above_its_limit_and_not_at_it(configure: Configure) -> None:
    assert found(configure, train={"global_batch_size": 2 * MOST_PASSES, "micro_batch_size": 2}) == []
    [passes] = found(configure, train={"global_batch_size": 2 * MOST_PASSES + 1, "micro_batch_size": 2})
    assert "65,537 / (1 x 2) x 1 = 32,769 passes per rank and step" in passes
    assert found(configure, 2, train={"global_batch_size": 2 * MOST_PASSES + 1, "micro_batch_size": 2}) == []
    experts = {"architecture": "mixtral", "num_hidden_layers": 1000}
    assert found(configure, model=experts | {"num_local_experts": 300}) == []
    [tensors] = found(configure, model=experts | {"num_local_experts": 400})
    assert "1,216,000 tensors" in tensors
    assert found(configure, parallel={"dp": 2**20}) == []
    assert "1,048,577 ranks" in found(configure, parallel={"dp": 2**20 + 1})[0]


def test_all_problems_are_in_one_error(configure: Configure) -> None:
    sizes: dict[str, Any] = {"parallel": {"tp": 2**21}, "train": {"global_batch_size": 10**9}}
    with pytest.raises(ParallelError, match=r"(?s)\(1\) \[parallel\].*\(2\) \[train\]"):
        refuse(found(configure, **sizes))
