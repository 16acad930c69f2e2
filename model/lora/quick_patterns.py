"""The check that regular expressions which a stranger wrote come to an end.

Python's `re` can take 2^n steps for n characters, with "(a+)+b" for example, and no other thread runs meanwhile: a
server that loads such an adapter would answer no more. So they are tried in a process of their own first.
"""

import json
import subprocess
from collections.abc import Collection, Sequence
from typing import Final

from ...core.errors import ConfigError
from ...core.process import start_module

MODULE: Final = "tk.model.lora.match_names"
SECONDS: Final = 10.0  # of which a start on a full machine takes most


def require_quick(expressions: Collection[str], names: Sequence[str], where: str, seconds: float = SECONDS) -> None:
    """Raises ConfigError if matching all names with all expressions takes longer than so many seconds.

    Args:
        expressions: regular expressions that `re` compiles.
        names: the names to be matched.
        where: the file that the expressions are from, for the error.
        seconds: the most that it may take, the start of a process included.
    """
    if not expressions:
        return
    work = json.dumps({"expressions": list(expressions), "names": list(names)}).encode()
    process = start_module(MODULE, stdin=subprocess.PIPE)
    try:
        process.communicate(work, seconds)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{where}: matching the names of modules with {', '.join(map(repr, expressions))} takes more than "
            f"{seconds:g} s. Repeat no group that repeats something itself, as (a+)+ does, or list the modules by name."
        ) from error
    finally:
        process.kill()
        process.wait()
