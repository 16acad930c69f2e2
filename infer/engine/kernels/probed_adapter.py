"""The adapter with which backends are checked before they have any: random factors beside every linear layer."""

import math
from typing import Final

import numpy as np

from ....core.casts import Array, cast
from ....core.dtypes import FP32, by_name
from ..job import Job
from ..program.adapters import RankAdapter, UpFactor, WeightAdapter, adapted_matrices, expert_matrices
from ..program.lower import Program

_MOST_RANK: Final = 16  # kernels take further rows as they take these


def probed_adapter(program: Program, job: Job) -> RankAdapter:
    """Returns an adapter of a job's slots, with factors of experts if some may have them."""
    dtype, rank, draws = by_name(job.dtype), min(job.max_adapter_rank, _MOST_RANK), np.random.default_rng(0)

    def drawn(rows: int, columns: int) -> Array:
        values = draws.standard_normal((rows, columns), np.float32) / np.float32(math.sqrt(columns))
        return cast(values.astype(FP32.numpy), FP32, dtype)

    matrices = [(matrix, 1) for matrix in adapted_matrices(program)]
    matrices += expert_matrices(program) if job.adapts_experts else ()
    beside = {
        matrix.name: WeightAdapter(
            drawn(experts * rank, matrix.in_features),
            (UpFactor(drawn(experts * matrix.out_features, rank), first_row=0, first_rank=0, scale=0.5),),
            experts,
        )
        for matrix, experts in matrices
    }
    return RankAdapter(beside, own={})
