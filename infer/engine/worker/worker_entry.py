"""The entry point of a worker: `python -m tk.infer.engine.worker.worker_entry FD LOADER`: its sockets to the engine.

Before any slow import, the process arranges to die with the engine: an engine that is killed while its workers start
leaves no process behind.
"""

import signal
import sys

from ....core.process import die_with_parent, lasting_imports


def main() -> int:
    """Runs the worker; returns when the engine has ended."""
    die_with_parent()  # the socket's end is not enough: a worker that waits for other ranks does not read it
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the engine decides when its workers end
    with lasting_imports():
        from .worker import work
    work(int(sys.argv[1]), loader=int(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
