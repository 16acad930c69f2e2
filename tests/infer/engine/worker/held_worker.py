"""A worker whose loader waits before it packs an adapter: for a text that comes through the named pipe of its rank."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tk.core.errors import CheckpointError
from tk.core.process import die_with_parent
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.program.adapters import RankAdapter
from tk.infer.engine.worker.worker import load, work

MODULE = __name__
PIPE = "TK_TEST_PIPE"  # the environment variable with the path of the pipe, without the number of the rank


def held(job: Job) -> Backend:
    """Loads a backend that packs an adapter when the pipe says so: "" = it may, else the message of an error."""
    backend = load(job)
    pack = backend.pack_adapter

    def wait_and_pack(slot: int, adapter: RankAdapter) -> Callable[[], object]:
        word = Path(f"{os.environ[PIPE]}{job.rank}").read_text()
        if word:
            raise CheckpointError(word)
        return pack(slot, adapter)

    backend.pack_adapter = wait_and_pack  # type: ignore[method-assign]
    return backend


if __name__ == "__main__":
    die_with_parent()
    work(int(sys.argv[1]), held, int(sys.argv[2]))
