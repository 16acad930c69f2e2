"""Prints what tk requires to run: python requirements_of.py [EXTRA ...], in the folder of pyproject.toml"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    print(*project["dependencies"], *(line for extra in sys.argv[1:] for line in extras[extra]), sep="\n")


if __name__ == "__main__":
    main()
