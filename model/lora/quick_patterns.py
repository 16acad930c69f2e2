"""The check that regular expressions which a stranger wrote come to an end.

Python's `re` can take 2^n steps for n characters, with "(a+)+b" for example, and no other thread runs meanwhile: a
server that loads such an adapter would answer no more. So they are tried in a process of their own first.
"""

import json
import signal
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Final

from ...core.errors import ConfigError, TkError
from ...core.process import start_module

MODULE: Final = "tk.model.lora.match_names"
SECONDS: Final = 5.0  # of CPU time: a start from a disk that stalls takes longer, whatever the expressions
LONGEST_WAIT: Final = 300.0  # seconds for the process, which may be stopped


def require_quick(expressions: Collection[str], names: Sequence[str], where: str, seconds: float = SECONDS) -> None:
    """Raises ConfigError if matching all names with all expressions takes more CPU time than so many seconds.

    Args:
        expressions: regular expressions that `re` compiles.
        names: the names to be matched.
        where: the file that the expressions are from, for the error.
        seconds: the most CPU time that it may take.

    Raises:
        TkError: the process that tries it was killed, or does not end.
    """
    if not expressions:
        return
    work = json.dumps({"expressions": list(expressions), "names": list(names)}).encode()
    with start_module(MODULE, [str(seconds)], stdin=subprocess.PIPE) as process:
        try:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(work, LONGEST_WAIT)
        finally:
            process.kill()
    code = process.returncode
    if code == -signal.SIGPROF:
        raise ConfigError(
            f"{where}: matching the names of modules with {', '.join(map(repr, expressions))} takes more than "
            f"{seconds:g} s. Repeat no group that repeats something itself, as (a+)+ does, or list the modules by name."
        )
    if code:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise TkError(
            f"{where}: the process that tries the regular expressions of the names of modules {how}. Try again; if it "
            "comes again, list the modules by name."
        )
