"""A worker process whose backend computes nothing: all that it costs is the way of a step to the backend and back."""

import sys

import numpy as np

from tk.core.casts import Array
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend, Masks, no_masks
from tk.infer.engine.step.channel import Channel
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.worker.worker import work


class ZeroCompute(Backend):
    """A `Backend` that chooses token 7 for every row.

    Args:
        rank: the number of this rank.
    """

    kernels = "zero"
    kv_bytes = 0

    def __init__(self, rank: int) -> None:
        self.samples = rank == 0

    def step(self, plan: RunningPlan, masks: Masks = no_masks, channel: Channel | None = None) -> SamplerOutput | None:
        """Returns and sends the tokens on rank 0, else None."""
        if not self.samples:
            return None
        num_rows = len(plan.rows)
        output = SamplerOutput.of_tokens(np.full(num_rows, 7, np.int32), np.ones(num_rows, np.uint8))
        if channel is not None:
            channel.send_result(output)
        return output

    def sample_again(self, masks: Array, rows: Array) -> SamplerOutput:
        """Fails: no row has candidates."""
        raise AssertionError("rows without candidates are sampled once")

    def logits(self, plan: RunningPlan) -> Array:
        """Returns zeros."""
        return np.zeros((len(plan.rows), 1), np.float32)


def load(job: Job) -> ZeroCompute:
    """Prepares nothing."""
    return ZeroCompute(job.rank)


if __name__ == "__main__":
    work(int(sys.argv[1]), load)
