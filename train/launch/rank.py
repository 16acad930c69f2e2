"""The entry of a training rank, `python -m tk.train.launch.rank CONFIG RESUME [--fork]`: tied to its launcher before
it loads anything that takes time, so that no rank outlives a launcher that dies early."""

import os
import sys

from ...core.process import die_with_parent
from .launcher import LAUNCHER_VARIABLE


def main() -> int:
    """The process's entry."""
    die_with_parent(int(os.environ[LAUNCHER_VARIABLE]))
    from .worker import main as work

    return work()


if __name__ == "__main__":
    sys.exit(main())
