"""The entry of a training rank, `python -m tk.train.launch.rank CONFIG RESUME [--fork]`: tied to its launcher before
it loads anything that takes time, so that no rank outlives a launcher that dies early."""

import sys

from ...core.process import die_with_parent


def main() -> int:
    """The process's entry."""
    die_with_parent()
    from .worker import main as work

    return work()


if __name__ == "__main__":
    sys.exit(main())
