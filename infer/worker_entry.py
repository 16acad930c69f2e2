"""How a worker begins: `python -m tk.infer.worker_entry FD`, its socket to the engine.

It ties itself to the engine before anything slow is imported: an engine that is killed while its workers start leaves
none behind.
"""

import signal
import sys

from ..core.process import die_with_parent


def main() -> int:
    """The process's entry. Returns when the engine is gone."""
    die_with_parent()  # also where we wait for other ranks, not for the engine
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # the engine decides when its workers end
    from .worker import work

    work(int(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
