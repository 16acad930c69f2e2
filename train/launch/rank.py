"""The entry point of a training rank: `python -m tk.train.launch.rank CONFIG RESUME FORM [--fork] [--json]`.

FORM is that of the log, see `show_log`. The module ties the process to its launcher before it imports torch, which
takes seconds. A rank so never outlives a launcher that dies early.
"""

import sys

from ...core.process import die_with_parent, lasting_imports


def main() -> int:
    """Runs the rank and returns its exit code."""
    die_with_parent()
    with lasting_imports():
        from .worker import main as work
    return work()


if __name__ == "__main__":
    sys.exit(main())
