"""The child of `require_quick`: `python -m` this module matches regular expressions with names, and answers nothing.

SIGPROF ends the process if that takes more CPU time than the seconds that its argument says.
"""

import json
import re
import signal
import sys

from ...core.process import die_with_parent


def match() -> None:
    """Matches each expression of the JSON document on stdin with each of its names."""
    work = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    for expression in map(re.compile, work["expressions"]):
        for name in work["names"]:
            expression.fullmatch(name)
    signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    die_with_parent()
    match()
