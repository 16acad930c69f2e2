"""The stages of a pipeline rank: the layers that it has, the units of ZeRO stage 3, and the loss of a micro-batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tk.core.labels import IGNORED
from tk.core.layout import Layout
from tk.model.decoder import Decoder
from tk.tests.train.engine.small_decoders import (
    CPU,
    HIDDEN,
    LENGTH,
    fill,
    make_config,
    make_mesh,
    make_stages,
    micro_batch,
)
from tk.train.engine.attention import causal_attention
from tk.train.engine.row_packer import RowPacker
from tk.train.engine.stages import StagePass, gathered_units
from tk.train.zero.flat_buffers import FlatBuffers
from tk.train.zero.states.open_states import StatePlaces


def filled(layout: Layout, pp: int = 0, **changes: object) -> tuple[tuple[Decoder, ...], FlatBuffers]:
    """Returns the stages of a pipeline rank with their parameters in buckets."""
    mesh = make_mesh(layout, pp)
    table, stages = make_stages(make_config(**changes), mesh)
    return stages, FlatBuffers(stages, table, mesh, dtype=torch.float32, places=StatePlaces(CPU), fill=fill)


def test_layers_are_dealt_to_the_ranks_in_turn_and_need_no_memory() -> None:
    for rank, expected in enumerate(([["0"], ["2"]], [["1"], ["3"]])):
        _, stages = make_stages(make_config(), make_mesh(Layout(pp=2, virtual_stages=2), rank))
        assert [list(stage.model.layers) for stage in stages] == expected
        assert all(parameter.is_meta for stage in stages for parameter in stage.parameters())
        assert [stage.model.embed_tokens is not None for stage in stages] == [rank == 0, False]
        assert [stage.lm_head is not None for stage in stages] == [False, rank == 1]


@pytest.mark.parametrize("tied", [False, True])
def test_units_are_the_layers_and_both_ends_in_the_order_of_forward(tied: bool) -> None:
    (decoder,), buffers = filled(Layout(zero=3, bucket_size=300), tie_word_embeddings=tied)
    (units,) = gathered_units([decoder], buffers)
    trunk, layers = decoder.model, list(decoder.model.layers.values())
    head = decoder.lm_head
    assert [list(unit.modules) for unit in units] == [
        [trunk.embed_tokens, head] if tied else [trunk.embed_tokens],
        *([layer] for layer in layers),
        [trunk.norm] if tied else [trunk.norm, head],
    ]
    assert [unit.used_in_backward for unit in units] == [tied, *[True] * 5], "backward of a lookup reads no values"
    held = [id(bucket) for unit in units for bucket in unit.buckets]
    assert sorted(held) == sorted(map(id, buffers.buckets)), "each bucket is in one unit"
    assert len(held) > len(units), "a layer has several buckets"
    for unit in units:
        held_by_modules = {id(parameter) for module in unit.modules for parameter in module.parameters()}
        assert {id(parameter) for bucket in unit.buckets for parameter in bucket.parameters} == held_by_modules


def test_each_stage_of_a_rank_has_its_own_units() -> None:
    stages, buffers = filled(Layout(pp=2, virtual_stages=2, zero=3), pp=1)
    units = gathered_units(stages, buffers)
    assert [[list(unit.modules) for unit in stage] for stage in units] == [
        [[stages[0].model.layers["1"]]],
        [[stages[1].model.layers["3"]], [stages[1].model.norm, stages[1].lm_head]],
    ]


def test_the_loss_is_a_sum_over_targets_that_count_times_the_factor() -> None:
    (decoder,), _ = filled(Layout())
    batch = micro_batch(1)
    batch.targets[0, 2:5] = IGNORED
    stage = StagePass(decoder, CPU)
    stage.micro_batches, stage.loss_factor = RowPacker([decoder], CPU).pack([micro_batch(0), batch]), 0.25
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    logits = decoder.logits(decoder(torch.from_numpy(batch.inputs), positions, causal_attention))
    summed = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten(), reduction="sum")
    torch.testing.assert_close(stage.forward(1, None).float(), 0.25 * summed)
    assert stage.balances == [], "a model without experts has no routers to balance"


def test_stages_one_after_another_give_the_loss_of_the_whole_model() -> None:
    (whole,), _ = filled(Layout())
    (first,), _ = filled(Layout(pp=2), 0)
    (second,), _ = filled(Layout(pp=2), 1)
    losses = []
    for decoders in ([whole], [first, second]):
        x = None
        for decoder in decoders:
            stage = StagePass(decoder, CPU)
            stage.micro_batches, stage.loss_factor = RowPacker([decoder], CPU).pack([micro_batch(0)]), 1.0
            x = stage.forward(0, x)
            assert decoder.stage.last or x.shape == (2, LENGTH, HIDDEN)
        losses.append(x)
    assert torch.equal(*losses)  # type: ignore[arg-type]


def test_rows_that_fill_up_a_batch_do_not_count_in_the_balance_of_experts() -> None:
    (decoder,), _ = filled(Layout(), architecture="mixtral", num_local_experts=4)
    batch = micro_batch(0)
    batch.targets[1] = IGNORED
    other = replace(batch, inputs=batch.inputs.copy())
    other.inputs[1] = np.arange(LENGTH)
    stage = StagePass(decoder, CPU)
    stage.micro_batches = RowPacker([decoder], CPU).pack([batch, other, micro_batch(0)])
    stage.balance_weight = 0.1
    for number in range(3):
        stage.forward(number, None)
    real, again, both = (float(balance.total()) for balance in stage.balances)
    assert real == pytest.approx(again, rel=1e-6), "whatever is in the other row"
    assert both > 1.5 * real
    with torch.no_grad():
        stage.forward(0, None)
    assert len(stage.balances) == 3, "an evaluation balances nothing"
