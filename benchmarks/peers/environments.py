"""Virtual environments of peers, whose requirements differ from tk's; .build/peers keeps them from their first use on.

PEER.txt in this folder lists the packages that pip installs for a peer, PEER-build.txt those that it needs first, and
PEER-alone.txt, where there is one, those that come without what they require: PEER.txt has the part of it that is used.
"""

import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
BUILD: Final = HERE.parents[1] / ".build"
_STEPS: Final = (("-build", "--no-build-isolation"), ("-alone", "--no-deps"), ("", "--no-build-isolation"))


def peer_environment() -> dict[str, str]:
    """Returns the environment variables of a peer, by which it imports `tk.benchmarks.peers` and uses no GPU."""
    return {
        "PYTHONPATH": str(BUILD),
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "TORCH_EXTENSIONS_DIR": str(_extensions()),
    }


def _extensions() -> Path:
    """Returns the folder of the C++ extensions that torch compiles for peers at their first run (DeepSpeed's)."""
    return BUILD / "peers" / "extensions"


def _remove_locks() -> None:
    """Removes the locks of interrupted builds of extensions, for whose end torch would wait for ever."""
    for lock in _extensions().glob("**/lock"):
        lock.unlink()


def python_of(peer: str) -> Path:
    """Returns the interpreter of a peer's environment, which is made if it is missing or its requirements changed.

    No other benchmark may be running.

    Raises:
        subprocess.CalledProcessError: pip cannot install the peer.
    """
    _remove_locks()
    steps = [(HERE / f"{peer}{part}.txt", option) for part, option in _STEPS if (HERE / f"{peer}{part}.txt").exists()]
    folder = (BUILD / "peers" / peer).resolve()  # it may be a link, which venv refuses
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = "".join(file.read_text(encoding="utf-8") for file, _ in steps)
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making {peer}'s environment in {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    for file, option in steps:
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, option, "-r", str(file)], check=True)
    link = BUILD / "tk"  # as `make` has it
    if not link.exists():
        link.symlink_to("..")
    ready.write_text(wanted, encoding="utf-8")
    return python


def python_if_possible(peer: str) -> Path | None:
    """Returns `python_of(peer)`, or None with a line on stderr if pip fails, as on a machine without a network."""
    try:
        return python_of(peer)
    except subprocess.CalledProcessError as error:
        command = " ".join(map(str, error.cmd))
        print(f"{peer} is left out, because it could not be installed: `{command}` failed", file=sys.stderr, flush=True)
        return None
