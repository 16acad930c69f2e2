"""A process that runs a scenario in children of its own and has each killed by SIGKILL at another operation.

`python crash_job.py SCENARIO FOLDER STRIDE` prints how many operations there were, of which it tried each
STRIDE-th; any broken promise is a traceback. It imports no torch and has no threads, so forking it is safe and takes
milliseconds.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from tk.tests.checkpoint.crashing import SCENARIOS, Scenario, act_as_if_large
from tk.tests.checkpoint.faults import AtOperation, kill, watched


def run_child(scenario: Scenario, folder: Path, index: int) -> tuple[int, int]:
    """Runs the scenario in a child that dies at operation `index`: its wait status and the last number it reported."""
    reading, writing = os.pipe()

    def report(number: int) -> None:
        os.write(writing, bytes([number]))

    child = os.fork()
    if child == 0:
        try:
            with watched(AtOperation(index, kill)):
                scenario.run(folder, report)
        except BaseException as error:
            print(f"the child failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        reports = pipe.read()
    return status, reports[-1] if reports else 0


def main() -> None:
    """Operation after operation, until the scenario ends by itself."""
    act_as_if_large()
    scenario, folder = SCENARIOS[sys.argv[1]], Path(sys.argv[2])
    scenario.prepare(folder / "before")
    index = 0
    while True:
        shutil.copytree(folder / "before", folder / "now")
        status, reported = run_child(scenario, folder / "now", index)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
        else:
            assert os.WEXITSTATUS(status) == 0
        scenario.check(folder / "now", reported)
        shutil.rmtree(folder / "now")
        if not os.WIFSIGNALED(status):
            break
        index += int(sys.argv[3])
    print(index)


if __name__ == "__main__":
    main()
