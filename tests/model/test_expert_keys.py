"""Which layers have experts."""

import pytest

from tk.model.expert_keys import sparse_layers
from tk.model.shape import ModelShape
from tk.model.spec import DenseSpec, ExpertsSpec


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [(1, (), [0, 1, 2, 3]), (2, (), [1, 3]), (3, (), [2]), (1, (0, 3), [1, 2]), (2, (1, 9), [3])],
)
def test_every_so_many_layers_have_experts_but_those_that_are_named(
    step: int, dense: tuple[int, ...], expected: list[int]
) -> None:
    shape = ModelShape(vocab_size=8, decoder_sparse_step=step, mlp_only_layers=dense, moe_intermediate_size=24)
    shared = DenseSpec(40)
    layers = sparse_layers(shape, [None, 5, None, 6], shared)
    assert [layer.window for layer in layers] == [None, 5, None, 6]
    blocks = dict(enumerate(layer.feed_forward for layer in layers))
    assert [layer for layer, block in blocks.items() if isinstance(block, ExpertsSpec)] == expected
    experts = ExpertsSpec(24, shape.num_local_experts, shape.num_experts_per_tok, normalize=False, shared=shared)
    assert {block for block in blocks.values() if isinstance(block, ExpertsSpec)} == {experts}
    assert {block for block in blocks.values() if isinstance(block, DenseSpec)} <= {DenseSpec(shape.intermediate_size)}
