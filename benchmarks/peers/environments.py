"""Environments of peers whose requirements are not ours: made in .build/peers on first use, kept while unchanged.

PEER.txt beside this file lists what pip installs for a peer; PEER-build.txt what its own build needs to be there.
"""

import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
BUILD: Final = HERE.parents[1] / ".build"


def peer_environment() -> dict[str, str]:
    """The variables that a peer needs: it finds `tk.benchmarks.peers` in the repository, and no GPU."""
    return {"PYTHONPATH": str(BUILD), "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, which is made if it is not there or its requirements have changed.

    Raises:
        subprocess.CalledProcessError: pip cannot install it.
    """
    files = [HERE / f"{peer}-build.txt", HERE / f"{peer}.txt"]
    folder = BUILD / "peers" / peer
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = "".join(file.read_text(encoding="utf-8") for file in files)
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making {peer}'s environment in {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    for file in files:
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--no-build-isolation", "-r", str(file)], check=True)
    link = BUILD / "tk"  # as `make` has it
    if not link.exists():
        link.symlink_to("..")
    ready.write_text(wanted, encoding="utf-8")
    return python


def python_if_possible(peer: str) -> Path | None:
    """As `python_of`; None, and a line on stderr, where it cannot be made: a machine without network has no peers."""
    try:
        return python_of(peer)
    except subprocess.CalledProcessError as error:
        print(f"{peer} is left out: `{' '.join(map(str, error.cmd))}` failed", file=sys.stderr, flush=True)
        return None
