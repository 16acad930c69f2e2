"""The optional parts of the installation, and the lines that install them.

The lines name an extra's packages themselves. They work from a checkout and from a wheel, and no index has to know tk:
an index where tk is not published could answer its name with a stranger's package.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Final

DISTRIBUTION: Final = "tk-lm"

_PROJECT: Final = Path(__file__).parents[1] / "pyproject.toml"


def install_line(extra: str) -> str:
    """Returns the command that installs the packages of an extra, as `pip install 'pyarrow>=18'`."""
    packages = (f"'{requirement}'" for requirement in requirements_of(extra))
    return f"pip install {' '.join(packages)}"


def requirements_of(extra: str, project: Path = _PROJECT) -> list[str]:
    """Returns the requirements of an extra: a checkout's, which may be newer than its installation, or a wheel's."""
    if project.is_file():
        extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        return list(extras[extra])
    declared = (each.partition(";") for each in importlib.metadata.requires(DISTRIBUTION) or ())
    return [name.strip() for name, _, marker in declared if marker.replace('"', "'").strip() == f"extra == '{extra}'"]


def release_of(version: str) -> tuple[int, int]:
    """Returns the major and minor number of a version of torch, as of "2.13.0+cpu"; (0, 0) if it names none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
