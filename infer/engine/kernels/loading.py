"""The load of a rank's weights, and of what its cache must know of them."""

from ....checkpoint.read.shared_read import Peers
from ....core.casts import Array
from ....core.dtypes import by_name
from ....core.local_params import LocalParam
from ..job import Job
from ..kv_formats import kv_format
from ..program.equalization import KeyEqualizer
from ..program.lower import Program
from ..program.weights import LoadParams, TakeParam


def load_weights(
    job: Job, program: Program, load: LoadParams, take: TakeParam, peers: Peers, threads: int
) -> dict[int, Array]:
    """Hands every parameter of a rank to `take` (see `load_params`); every rank of `peers` calls it.

    Returns:
        The factors of each layer's keys (see `KeyEqualizer.factors`); {} for a cache whose keys are not equalized.

    Raises:
        CheckpointError: the weights cannot be loaded.
    """
    if not kv_format(job.kv_dtype).is_equalized:
        load(take, peers, threads)
        return {}
    equalizer = KeyEqualizer(program, by_name(job.dtype))

    def take_both(param: LocalParam, values: Array) -> None:
        equalizer.take(param, values)
        take(param, values)

    load(take_both, peers, threads)
    return equalizer.factors(peers)
