"""`tk` commands under a limit of the system, set by the process itself: this one's threads forbid a preexec_fn."""

import sys

LIMITED = """
import resource, sys
limit, value = map(int, sys.argv[1:3])
resource.setrlimit(limit, (value, value))
from tk.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


def limited(limit: int, value: int, *words: str) -> list[str]:
    """The command line of `tk WORDS`, or its beginning, under a limit, one of `resource.RLIMIT_...`."""
    return [sys.executable, "-P", "-c", LIMITED, str(limit), str(value), *words]
