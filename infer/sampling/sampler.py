"""The sampler: it turns logits into tokens by bias, penalties, temperature, top-k, top-p and min-p (docs/wire.md)."""

from collections.abc import Callable

import numpy as np

from ..scheduling.step_plan import Array, SamplerOutput, SamplingRows
from . import numpy_sampler
from .native_sampler import native_sampler

Sample = Callable[[Array, SamplingRows, Array | None, SamplerOutput], None]


def best_sampler(threads: int = 1) -> Sample:
    """Returns the fastest implementation of this machine; its first use ever takes seconds to build.

    Args:
        threads: the number of threads that the C one divides the rows among. Only one thread may call the result.
    """
    return native_sampler(threads) or numpy_sampler.sample


def run_sampler(
    logits_RV: Array, rows: SamplingRows, masks: Array | None = None, sample: Sample = numpy_sampler.sample
) -> SamplerOutput:
    """Chooses a token for every row whose target is SAMPLE, and scores the tokens of all rows that request it.

    The result of a row depends only on that row. A row whose logits are not all finite gets `finite` 0 and token 0.

    Args:
        logits_RV: the raw logits in fp32, without padding of the vocabulary; consecutive in each row.
        rows: the options of the rows.
        masks: uint32 [R, ceil(V / 32)], bit id % 32 of word id // 32 of a row allows the token; None = all tokens.
        sample: the implementation, which fills an output of zeros (see `best_sampler`).
    """
    num_rows, most = len(rows), max(0, int(rows.num_top.max(initial=0)))
    output = SamplerOutput(
        token_ids=np.zeros(num_rows, np.int32),
        finite=np.zeros(num_rows, np.uint8),
        logprob=np.zeros(num_rows, np.float32),
        rank=np.zeros(num_rows, np.int32),
        top_ids=np.zeros((num_rows, most), np.int32),
        top_logprobs=np.zeros((num_rows, most), np.float32),
    )
    sample(logits_RV, rows, masks, output)
    return output
