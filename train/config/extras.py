"""Optional parts of the installation: refused by name, before anything starts, where they are missing."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from ...core.errors import ConfigError


def require_extra(module: str, extra: str, what: str, instead: str) -> None:
    """Raises ConfigError if `module` of an extra is not installed.

    Args:
        what: needs it, as the subject of a sentence.
        instead: what works without it.
    """
    if find_spec(module) is None:
        raise ConfigError(f"{what} needs the extra `{extra}`: pip install 'tk-toolkit[{extra}]'. {instead}")


def require_tensorboard() -> None:
    """Raises ConfigError if event files cannot be written."""
    require_extra(
        "tensorboard",
        "tensorboard",
        "[metrics] tensorboard = true",
        "Without it metrics.jsonl has the same values, and `tk plot RUN` draws them.",
    )


def missing_for_compile() -> str:
    """What torch.compile lacks on a CPU; "" if nothing."""
    name = os.environ.get("CXX", "g++")
    if not shutil.which(name):
        return f"there is no C++ compiler {name} in PATH"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"there is no {header}"
