"""The factors of a rank: the parts of the logical tensors that its weights have, and their places."""

from pathlib import Path

import numpy as np
import pytest

from tk.checkpoint import Checkpoint
from tk.core.casts import Array
from tk.core.dtypes import BF16, FP32
from tk.infer.engine.program.adapters import RankAdapter, adapter_bytes, load_adapter
from tk.infer.engine.program.lower import Program, lower
from tk.infer.engine.program.operations import Multiply
from tk.infer.engine.program.own_params import head_bytes, summed_biases
from tk.model.registry import decoder_spec
from tk.model.spec import HEAD
from tk.model.stored_adapter import StoredAdapter
from tk.model.stored_config import stored_config
from tk.tests.infer.adapters import OWN, make_adapter
from tk.tests.model.architectures import ENTRIES


def loaded(base: Path, adapter: Path, tp: int = 1, rank: int = 0) -> tuple[Program, RankAdapter]:
    """Returns the program of a rank and its part of an adapter."""
    config, stored = stored_config(Checkpoint.open(base)), StoredAdapter.of(Checkpoint.open(adapter))
    program = lower(decoder_spec(config), tp, rank)
    return program, load_adapter(program, stored.decoder(config), stored.checkpoint, FP32)


def product(adapter: RankAdapter, name: str, out_features: int) -> Array:
    """Returns scale B A of a weight, [out, in]."""
    of_weight = adapter.beside[name]
    total = np.zeros((out_features, of_weight.down.shape[1]))
    for up in of_weight.ups:
        own = of_weight.down[up.first_rank : up.first_rank + up.rank].astype(np.float64)
        total[up.first_row : up.first_row + len(up.values)] += up.scale * up.values @ own
    return total


def products(base: Path, adapter: Path, tp: int, rank: int) -> dict[str, tuple[Multiply, Array]]:
    """Returns the multiplications of a rank by weight, each with scale B A of its weight."""
    program, found = loaded(base, adapter, tp, rank)
    return {
        each.matrix.name: (each, product(found, each.matrix.name, each.matrix.out_features))
        for each in program.operations
        if isinstance(each, Multiply)
    }


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
@pytest.mark.parametrize("tp", [2, 4])
def test_the_products_of_all_ranks_are_those_of_one(tmp_path: Path, name: str, tp: int) -> None:
    ENTRIES[name].make(tmp_path / "base")
    adapter = make_adapter(tmp_path / "run", tmp_path / "base", rank=5)
    ranks = [products(tmp_path / "base", adapter, tp, rank) for rank in range(tp)]
    for weight, (operation, whole) in products(tmp_path / "base", adapter, 1, 0).items():
        parts = [each[weight][1] for each in ranks]
        if operation.target == "partial":
            np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
        else:  # rows of linear layers that are stacked
            assert {row.tobytes() for part in parts for row in part} == {row.tobytes() for row in whole}


def test_a_plan_counts_at_least_the_bytes_of_every_adapter(tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path / "base")
    adapter = make_adapter(tmp_path / "run", tmp_path / "base", rank=16, **OWN["llama3"])
    program, found = loaded(tmp_path / "base", adapter)
    held = sum(each.down.size + sum(up.values.size for up in each.ups) for each in found.beside.values())
    vectors = sum(values.size for values in found.own.values() if values.ndim == 1)
    planned = adapter_bytes(program, 16, BF16.itemsize)
    assert BF16.itemsize * held + FP32.itemsize * vectors < planned < 8 * BF16.itemsize * held
    assert found.own[HEAD].size * BF16.itemsize <= head_bytes(program, BF16.itemsize)


@pytest.mark.parametrize("name", ["gpt2 untied", "qwen3"])
def test_ranks_hold_what_an_adapter_has_of_its_own_as_they_hold_the_bases(tmp_path: Path, name: str) -> None:
    ENTRIES[name].make(tmp_path / "base")
    adapter = make_adapter(tmp_path / "run", tmp_path / "base", rank=5, **OWN[name])
    [(_, whole)], ranks = (
        [loaded(tmp_path / "base", adapter)],
        [loaded(tmp_path / "base", adapter, 2, r) for r in (0, 1)],
    )
    for program, found in ranks:
        shapes = {param.name: param.shape for param in program.params}
        assert {key: values.shape for key, values in found.own.items()} == {key: shapes[key] for key in found.own}
    (program, first), (_, second) = ranks
    assert whole.own.keys() == first.own.keys()
    assert first.own.keys() - second.own.keys() == summed_biases(program), "of a sum over ranks, the first rank's"
    joined = np.concatenate([first.own[HEAD], second.own[HEAD]])[: len(whole.own[HEAD])]
    np.testing.assert_array_equal(joined, whole.own[HEAD])
