"""A peer's end of bench_serving.py: a workload per line on stdin, its speeds per line on stdout, both in JSON."""

import json
import os
import sys
from collections.abc import Callable

from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload

Run = Callable[[SpeedWorkload], Speeds]


def serve(load: Callable[[], Run]) -> None:
    """Loads a model, says so by an empty reply, and runs workloads until stdin ends.

    Libraries print on stdout: what they print goes to stderr.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        run = load()
        print("{}", file=replies, flush=True)
        for line in sys.stdin:
            print(json.dumps(run(SpeedWorkload(**json.loads(line)))), file=replies, flush=True)
