"""The process that writes a rank's saves while the rank trains on.

`python -m tk.checkpoint.save.save_worker SOCKET MEMORY`: two inherited descriptors.

It is started by exec, imports no torch, ignores a terminal's signals, and dies with its rank. The rank sends lines of
JSON over the socket: first the job, then for each save its step and resume state. The answer is {}, on rank 0
{"saved": ...} with the fields of `SavedStep`, or an error. The values are in shared memory and in a file of states; the
rank changes neither before it has the answer.
"""

import json
import mmap
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from ...core.casts import Array
from ...core.defects import known_or_defect
from ...core.errors import TkError, pack
from ...core.ownership import Owned
from ...core.process import die_with_parent
from .save_job import Buffers, SaveJob
from .state_source import StateSource

_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)


def main() -> int:
    """The process's entry. Returns when the rank closes the socket."""
    connection, memory, source = (int(word) for word in sys.argv[1:4])
    die_with_parent()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)  # the rank decides when its writer ends
    with socket.socket(fileno=connection) as sock, sock.makefile("rw", encoding="utf-8") as stream:
        first = stream.readline()
        if not first:
            return 0
        job = SaveJob.from_json(json.loads(first))
        states = StateSource(source, tuple(sys.argv[4:]))
        copied = Buffers(job, states.slots)
        values = partial(copied.view, memoryview(mmap.mmap(memory, 0, access=mmap.ACCESS_READ)))
        for line in stream:
            request = json.loads(line)
            stream.write(json.dumps(_answer(job, _from_both(job, values, states, request), request)) + "\n")
            stream.flush()
    return 0


def _from_both(
    job: SaveJob, copied: Callable[[Owned], Array], states: StateSource, request: Mapping[str, Any]
) -> Callable[[Owned], Array]:
    """Returns a function of an item's elements: from the request's segments of the source, or from the copy."""
    items, stored_as = job.items(), job.stored_as()
    segments = {items[index]: places for index, places in request["segments"]}

    def values(item: Owned) -> Array:
        return states.read(segments[item], stored_as[item]) if item in segments else copied(item)

    return values


def _answer(job: SaveJob, values: Callable[[Owned], Array], request: Mapping[str, Any]) -> dict[str, Any]:
    step = request["step"]
    try:
        saved = job.save(step, request["resume"], values)
    except TkError as error:
        return {"error": pack(error)}
    except Exception as error:  # the process's boundary: the rank must receive every error
        found = known_or_defect(error, "The process that writes checkpoints")
        return {"error": pack(TkError(f"Step {step} was not saved. {found} Steps committed before are whole."))}
    return {"saved": asdict(saved)} if saved else {}


if __name__ == "__main__":
    sys.exit(main())
