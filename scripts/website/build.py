"""Builds the site of `make site` in .build/website, with Sphinx in an environment of its own; any warning fails it."""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent
REQUIREMENTS: Final = HERE / "requirements.txt"
VENV: Final = ROOT / ".build" / "website-venv"
SITE: Final = ROOT / ".build" / "website"
PIP: Final = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "30")


class CannotInstall(Exception):
    """Packages that could not be installed; the message says why."""


def environment(folder: Path = VENV) -> Path:
    """Makes the environment, unless it is there with the same packages, and returns its interpreter.

    Raises:
        CannotInstall: pip failed, perhaps since no registry answers.
    """
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = REQUIREMENTS.read_text()
    if ready.exists() and ready.read_text() == wanted:
        return python
    steps = ((sys.executable, "-m", "venv", "--clear", folder), (python, *PIP, "--requirement", REQUIREMENTS))
    for words in steps:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
            raise CannotInstall(f"The packages of {REQUIREMENTS} cannot be installed: {said[-1]}")
    ready.write_text(wanted)
    return python


def build(python: Path, out: Path = SITE) -> subprocess.CompletedProcess[str]:
    """Builds the site into `out`, anew; its output names every broken link, and then the exit code is not 0."""
    options = ("--builder", "html", "--fresh-env", "--fail-on-warning", "--keep-going", "--quiet")
    words = (python, "-m", "sphinx", *options, "--conf-dir", HERE, ROOT, out)
    return subprocess.run(words, capture_output=True, text=True)


def main() -> int:
    try:
        done = build(environment())
    except CannotInstall as error:
        print(error, file=sys.stderr)
        return 1
    print(done.stderr or f"The site is built: {SITE / 'index.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
