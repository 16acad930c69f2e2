"""Checks for optional parts of the installation, so that a run without them ends before it starts."""

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from ...core.errors import ConfigError
from ...core.extras import install_line


def require_extra(module: str, extra: str, option: str, instead: str) -> None:
    """Raises ConfigError if `module` of an extra is not installed.

    Args:
        option: the option that needs the module, as the subject of a sentence.
        instead: a sentence that names an alternative without the module.
    """
    if find_spec(module) is None:
        raise ConfigError(f"{option} needs the extra `{extra}`: {install_line(extra)}. {instead}")


def require_tensorboard() -> None:
    """Raises ConfigError if event files cannot be written."""
    require_extra(
        "tensorboard",
        "tensorboard",
        "[metrics] tensorboard = true",
        "Without it metrics.jsonl has the same values, and `tk plot RUN` draws them.",
    )


def missing_for_compile() -> str:
    """Returns the reason why torch.compile cannot work on a CPU of this machine; "" if it can."""
    name = os.environ.get("CXX", "g++")
    if not shutil.which(name):
        return f"the C++ compiler {name} is not in PATH"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"{header} does not exist"
