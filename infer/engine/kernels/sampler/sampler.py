"""The sampler: it turns logits into tokens by bias, penalties, temperature, top-k, top-p and min-p (docs/wire.md)."""

from collections.abc import Callable

from .....core.casts import Array
from ...step.sampler_output import SamplerOutput
from ...step.sampling_rows import SamplingRows
from . import numpy_sampler
from .native_sampler import native_sampler

Sample = Callable[[Array, SamplingRows, Array | None], SamplerOutput]


def best_sampler() -> Sample:
    """Returns the fastest implementation of this machine; its first use ever takes seconds to build.

    Only one thread at a time may call the result.
    """
    return native_sampler() or numpy_sampler.sample


def run_sampler(
    logits_RV: Array, rows: SamplingRows, masks: Array | None = None, sample: Sample = numpy_sampler.sample
) -> SamplerOutput:
    """Chooses a token for every row whose target is SAMPLE, and scores the tokens of all rows that request it.

    The result of a row depends only on that row. A row whose logits are not all finite gets `finite` 0 and token 0.

    Args:
        logits_RV: the raw logits in fp32, without padding of the vocabulary; consecutive in each row.
        rows: the options of the rows.
        masks: uint32 [M, ceil(V / 32)]: the masks that `rows.mask` numbers; bit id % 32 of word id // 32 allows that
            token; None = no row has a mask.
        sample: the implementation (see `best_sampler`).
    """
    return sample(logits_RV, rows, masks)
