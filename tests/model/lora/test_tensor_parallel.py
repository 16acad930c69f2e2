"""Decoders with adapters over tensor-parallel ranks against one process: loss and gradients of both factors."""

from typing import Any

import pytest
import torch

from tk.core.layout import Layout
from tk.parallel.mesh import Mesh
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.decoders import compare_with_one_process
from tk.tests.model.lora.peft_models import adapted_spec
from tk.tests.rank_pool import RankPool

PART = {
    "targets": r".*(k_proj|up_proj|c_attn|c_proj|o_proj|w3)",
    "rank_pattern": {r".*(h|layers)\.1\.(self_)?attn\..*": 3},
}
SAVED = {"targets": ["q_proj", "v_proj"], "modules_to_save": ["norm", "lm_head", "mlp"], "bias": "all"}


def compare(names: list[str], lora: dict[str, Any], options: dict[str, Any]) -> None:
    mesh = Mesh.build(Layout(tp=torch.distributed.get_world_size()), num_kv_heads=2)
    for name in names:
        compare_with_one_process(mesh, name, spec=adapted_spec(name, **({"rank": 4, "alpha": 4} | lora)), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"sequence_parallel": True, "recompute": "selective"},
        *(
            pytest.param(options, marks=pytest.mark.matrix)
            for options in (
                {},
                {"sequence_parallel": True},
                {"recompute": "full"},
                {"mlp_block": 3},
                {"sequence_parallel": True, "mlp_block": 3},
            )
        ),
    ],
    ids=str,
)
def test_every_architecture_with_adapters_equals_one_process(rank_pool: RankPool, options: dict[str, Any]) -> None:
    rank_pool.run(compare, 2, names=list(ENTRIES), lora={}, options=options)


@pytest.mark.matrix
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_adapters_of_a_part_of_a_fused_weight_equal_one_process(rank_pool: RankPool, sequence_parallel: bool) -> None:
    rank_pool.run(compare, 2, names=list(ENTRIES), lora=PART, options={"sequence_parallel": sequence_parallel})


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_modules_trained_whole_equal_one_process(rank_pool: RankPool, sequence_parallel: bool) -> None:
    rank_pool.run(compare, 2, names=["llama3"], lora=SAVED, options={"sequence_parallel": sequence_parallel})


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_more_ranks_than_kv_heads(rank_pool: RankPool, sequence_parallel: bool) -> None:
    rank_pool.run(compare, 4, names=["qwen2"], lora={}, options={"sequence_parallel": sequence_parallel})
