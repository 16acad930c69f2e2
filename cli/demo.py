"""`tk demo`: trains, reshards, verifies and serves a small model on this machine, by the commands of a user."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..core.errors import ConfigError, TkError
from ..core.process import PARENT_VARIABLE, module_command
from .common import PATH
from .demo_report import Stream, report

PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n")
NEW_TOKENS = 100
CONFIG_FILE = "demo.toml"
MADE = frozenset({CONFIG_FILE, "run", "tp1", "hugging-face"})
CONFIG = """\
# The run of `tk demo`: Python's standard library on two local ranks, tensor parallel, ZeRO-1. Change it and run
#   tk train {file}
[model]
architecture = "llama"
hidden_size = 384
intermediate_size = 1024
num_hidden_layers = 2
num_attention_heads = 6
num_key_value_heads = 2
max_position_embeddings = 1024
initializer_range = 0.05

[data]
sources = "stdlib"
vocab_size = 2048
cache = {cache}

[train]
steps = {steps}
global_batch_size = 8
micro_batch_size = 8
seq_len = 256

[optimizer]
lr = 2e-3
warmup_steps = {warmup_steps}
schedule = "cosine"

[precision]
params = "bf16"

[parallel]
tp = 2

[zero]
stage = 1

[checkpoint]
dir = {run}
"""


@click.command(epilog="Example: tk demo --out runs/demo")
@click.option(
    "--out",
    metavar="FOLDER",
    type=PATH,
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for all files of the demo; those of an earlier demo are replaced.",
)
@click.option(
    "--steps",
    metavar="N",
    type=click.IntRange(min=1),
    default=250,
    show_default=True,
    help="Training steps; with fewer, the demo is faster and the model worse.",
)
def demo(out: Path, steps: int) -> None:
    """Train a small model on this machine's Python library, reshard its checkpoint, serve it and stream text.

    Training runs on two tensor-parallel ranks with ZeRO-1, inference on one rank with an int8 KV cache, behind gRPC on
    a free loopback port. The demo takes about two minutes on two cores with AVX-512 and needs no network.
    """
    start = time.monotonic()
    config = _fresh_folder(out, steps)
    _title("1. Train on Python's own library: 2 tensor-parallel ranks, ZeRO-1, bf16 with fp32 masters")
    _run("train", str(config))
    _title("2. Reshard the checkpoint from tp 2 to tp 1, optimizer state included")
    resharded = _timed_run("reshard", str(out / "run"), str(out / "tp1"), "--tp", "1")
    _title("3. Verify every byte")
    _run("verify", str(out / "tp1"))
    _title("4. Serve it over gRPC with an int8 KV cache")
    with _server(out / "tp1") as address:
        _check_health(address)
        click.echo(f"serving at {address}, health SERVING")
        _title("5. Three prompts, streamed at once")
        streams = _stream_all(address)
    for stream in streams:
        click.echo(click.style(stream.prompt, bold=True) + stream.text + "\n" + "-" * 80)
    click.echo(report(out, resharded, streams, time.monotonic() - start))


def _title(text: str) -> None:
    click.echo("\n" + click.style(text, bold=True))


def _fresh_folder(out: Path, steps: int) -> Path:
    """Removes the files of an earlier demo from `out`, and nothing else; writes the configuration, returns its path.

    Raises:
        ConfigError: `out` holds files that no demo made.
    """
    found = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if found and (CONFIG_FILE not in found or not found <= MADE):  # a folder with a run in it may not be a demo's
        foreign = sorted(found - MADE or found)[0]
        raise ConfigError(f"{out} holds {foreign}, which no demo made: name another folder with --out.")
    for name in found & {"run", "tp1", "hugging-face"}:
        shutil.rmtree(out / name)
    out.mkdir(parents=True, exist_ok=True)
    config = out / CONFIG_FILE
    quoted = {key: json.dumps(str(path)) for key, path in (("run", out / "run"), ("cache", out.parent / "stdlib"))}
    config.write_text(CONFIG.format(file=config, steps=steps, warmup_steps=min(10, steps), **quoted), encoding="utf-8")
    return config


def _run(*arguments: str) -> None:
    """Runs a tk command as a user would; its output appears with that of the demo."""
    click.echo(f"$ tk {' '.join(arguments)}")
    within = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    done = subprocess.run(module_command("tk", arguments), env=within, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise TkError(f"`tk {' '.join(arguments)}` failed with exit code {done.returncode}; its error is above.")


def _timed_run(*arguments: str) -> float:
    start = time.monotonic()
    _run(*arguments)
    return time.monotonic() - start


@contextmanager
def _server(checkpoint: Path) -> Iterator[str]:
    """Starts `tk serve` in a process, yields its HOST:PORT, and drains it at the end."""
    arguments = ["serve", str(checkpoint), "--kv-dtype", "int8", "--port", "0", "--max-model-len", "512"]
    click.echo(f"$ tk {' '.join(arguments)}")
    process = subprocess.Popen(module_command("tk", arguments), stdout=subprocess.PIPE, text=True)
    try:
        ready = process.stdout.readline() if process.stdout else ""
        if not ready.startswith("ready "):
            raise TkError(f"`tk serve` ended with exit code {process.wait()} before it was ready; its error is above.")
        yield ready.split()[1]
        process.terminate()
        if process.wait(timeout=60) != 0:
            raise TkError(f"`tk serve` did not drain on SIGTERM: it ended with exit code {process.returncode}.")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _check_health(address: str) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="tk.v1.Generation")
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise TkError(
            f"The server at {address} is not healthy: its gRPC health status is {answer.status}, not SERVING."
        )


def _stream_all(address: str) -> list[Stream]:
    from ..infer.client.client import Client

    with Client(address, timeout=120) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda item: _stream(client, *item), enumerate(PROMPTS)))


def _stream(client: Any, seed: int, prompt: str) -> Stream:
    from ..infer.engine.request.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_new_tokens=NEW_TOKENS)
    start = first = time.monotonic()
    text, num_tokens = "", 0
    for delta in client.stream(prompt, params):
        if not num_tokens:
            first = time.monotonic()
        text += delta.text
        num_tokens += len(delta.token_ids)
    return Stream(prompt, text, num_tokens, first - start, time.monotonic() - first)
