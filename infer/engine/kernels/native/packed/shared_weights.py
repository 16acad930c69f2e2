"""The packed weights of a rank from a folder that servers share; a start that finds none there packs them."""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from ...... import __version__
from ......checkpoint.read.shared_read import Peers, share_errors
from ......core import quantization
from ......core.casts import Array
from ......core.dtypes import by_name
from ......core.errors import ConfigError
from ....job import Job
from ....kv_formats import kv_format
from ....program.lower import Program
from ..binding.library import SOURCE, Kernels
from ..packing import PackedWeights, stacks
from .folder import PackedFolder

_KEY: Final = 32  # hexadecimal digits
_KINDS: Final = ("matrix", "vector", "table", "factors")
# The Python that decides what a file holds: a checkout's may differ from another's of the same version.
_ENGINE: Final = Path(__file__).parents[3]
_CODE: Final = (_ENGINE / "kernels/native/packing.py", *_ENGINE.glob("program/*.py"), Path(quantization.__file__))


def shared_weights(
    job: Job, program: Program, kernels: Kernels, peers: Peers, pack: Callable[[], PackedWeights]
) -> PackedWeights:
    """Returns a rank's weights, mapped from its file in `job.packed`; every rank of `peers` calls it.

    If one rank has no usable file, all ranks pack theirs, because they read the checkpoint together.

    Args:
        job: the rank's job, with the fingerprint of its checkpoint.
        program: the rank's program.
        kernels: the kernels that will compute.
        peers: the ranks of the model.
        pack: loads and packs the rank's weights; every rank calls it or none.

    Raises:
        CheckpointError: the weights cannot be loaded.
        ConfigError: the folder cannot be used, or has no room.
    """
    with share_errors(peers):
        folder = PackedFolder(Path(job.packed))
        about = _about(job, program, kernels)
    key = peers.gather(hashlib.sha256(json.dumps(about).encode()).hexdigest()[:_KEY].encode())[0].decode()

    def find() -> PackedWeights | None:
        """Returns the weights if every rank has its own."""
        with share_errors(peers):
            arrays = folder.find(key, peers.rank, about, job.threads)
        every = all(peers.gather(b"" if arrays is None else b"found"))
        return _restored(arrays, job, program, kernels) if every and arrays is not None else None

    found = find()  # a folder that was filled before may be one that this process cannot write
    if found is not None:
        return found
    with ExitStack() as stack:
        with share_errors(peers):  # the other ranks wait here until rank 0 has the lock
            if peers.rank == 0:
                stack.enter_context(folder.locked(key))
        found = find()  # by another server, meanwhile
        if found is not None:
            return found
        arrays = _arrays(pack())
        with share_errors(peers):
            folder.add(key, peers.rank, arrays, about)
        del arrays  # the mapped ones replace them
        found = find()
        if peers.rank == 0:
            folder.remove_old(key)
    if found is None:
        raise ConfigError(
            f"The packed weights in {folder.path} changed as soon as they were written. Name a folder that no other "
            "program writes, or start without --packed."
        )
    return found


def _arrays(weights: PackedWeights) -> dict[str, Array]:
    """Returns all values of weights by kind and name."""
    factors = {str(layer): values for layer, values in weights.key_factors.items()}
    kinds = zip(_KINDS, (weights.memory, weights.vectors, weights.tables, factors), strict=True)
    return {f"{kind} {name}": values for kind, each in kinds for name, values in each.items()}


def _restored(arrays: Mapping[str, Array], job: Job, program: Program, kernels: Kernels) -> PackedWeights:
    kinds: dict[str, dict[str, Array]] = {kind: {} for kind in _KINDS}
    for full, values in arrays.items():
        kind, _, name = full.partition(" ")
        kinds[kind][name] = values
    memory, vectors, tables, factors = kinds.values()
    key_factors = {int(layer): values for layer, values in factors.items()}
    dtype = by_name(job.dtype)
    return PackedWeights(program, dtype, kernels, job.weight_dtype, memory, vectors, tables, key_factors)


def _about(job: Job, program: Program, kernels: Kernels) -> dict[str, str]:
    """Returns all that decides a rank's packed weights, as texts."""
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(_CODE)))
    return {
        "tk": __version__,
        "code": f"{SOURCE.stem(platform.machine())} {code.hexdigest()}",
        "kernels": kernels.instruction_set,
        "weights": job.fingerprint,
        "dtypes": f"{job.dtype} {job.weight_dtype} {kv_format(job.kv_dtype).is_equalized}",
        "rank": f"{job.rank} of {job.tp}",
        "layout": hashlib.sha256(repr([*stacks(program, job.weight_dtype)]).encode()).hexdigest(),
    }
