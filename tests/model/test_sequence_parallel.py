"""Sequence parallelism against one process: loss and every gradient, of every architecture."""

import pytest
import torch

from tk.core.errors import ParallelError
from tk.core.layout import Layout, Stage
from tk.parallel.mesh import Mesh
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.decoders import build, compare_with_one_process, config_of, loss_of, tokens
from tk.tests.rank_pool import RankPool
from tk.train.engine.attention import causal_attention


def _mesh() -> Mesh:
    return Mesh.build(Layout(tp=torch.distributed.get_world_size()), num_kv_heads=2)


def compare(names: list[str], sequence_parallel: bool) -> None:
    mesh = _mesh()
    for name in names:
        compare_with_one_process(mesh, name, sequence_parallel=sequence_parallel)


def check_stages() -> list[int]:
    """Compares two stages with the whole decoder; returns the shape of this rank's hidden states between them."""
    tp = _mesh().tp
    config = config_of("llama3")
    inputs, positions, _ = tokens()
    whole = build(config, tp, sequence_parallel=True)
    cuts = (Stage(range(1), last=False), Stage(range(1, 3), first=False))
    first, last = (build(config, tp, sequence_parallel=True, stage=cut) for cut in cuts)
    between = first(inputs, positions, causal_attention)
    chained = loss_of(last, last(between, positions, causal_attention))
    assert torch.equal(chained, loss_of(whole, whole(inputs, positions, causal_attention)))
    return list(between.shape)


def refused() -> str:
    """Returns the error for a sequence that tp does not divide."""
    decoder = build(config_of("llama3"), _mesh().tp, sequence_parallel=True)
    inputs, positions, _ = tokens()
    with pytest.raises(ParallelError) as error:
        decoder(inputs[:, :-1], positions[:, :-1], causal_attention)
    return str(error.value)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_architecture_equals_one_process(rank_pool: RankPool, sequence_parallel: bool) -> None:
    rank_pool.run(compare, 2, names=list(ENTRIES), sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_more_ranks_than_kv_heads(rank_pool: RankPool, sequence_parallel: bool) -> None:
    rank_pool.run(compare, 4, names=["qwen2"], sequence_parallel=sequence_parallel)


def test_hidden_states_between_stages_are_split(rank_pool: RankPool) -> None:
    assert rank_pool.run(check_stages, 2) == [[2, 8, 64]] * 2


def test_a_sequence_that_tp_does_not_divide_is_refused(rank_pool: RankPool) -> None:
    for message in rank_pool.run(refused, 2):
        assert "tp must divide their length, but length % tp = 15 % 2 = 1" in message
        assert "for example 16" in message
