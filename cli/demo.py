"""`tk demo`: the whole story on this machine, with the commands and files that a user would have."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..core.errors import ConfigError, TkError
from ..core.progress import format_bytes, format_seconds

PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n")
NEW_TOKENS = 100
CONFIG = """\
# What `tk demo` trains: Python's own library on two local ranks, tensor parallel, ZeRO-1. Change it and run
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
vocab_size = 1024
cache = "{cache}"

[train]
steps = 350
global_batch_size = 8
micro_batch_size = 8
seq_len = 256

[optimizer]
lr = 2e-3
warmup_steps = 10
schedule = "cosine"

[precision]
params = "bf16"

[parallel]
tp = 2

[zero]
stage = 1

[checkpoint]
dir = "{run}"
"""


@click.command(epilog="Example: tk demo --out runs/demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Folder for everything that the demo makes; an earlier demo's is replaced.",
)
def demo(out: Path) -> None:
    """Trains a small model on this machine's Python library, reshards its checkpoint, serves it and streams text.

    Two tensor-parallel training ranks with ZeRO-1, then one inference rank with an int8 KV cache behind gRPC on a free
    loopback port. Takes about two minutes on two cores and needs no network.
    """
    start = time.monotonic()
    config = _fresh_folder(out)
    _title("1. Train on Python's own library: 2 tensor-parallel ranks, ZeRO-1, bf16 with fp32 masters")
    _run("train", str(config))
    trained = _trained(out)
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
    _show_table(out, trained, resharded, streams, time.monotonic() - start)


def _title(text: str) -> None:
    click.echo("\n" + click.style(text, bold=True))


def _fresh_folder(out: Path) -> Path:
    config = out / "demo.toml"
    if out.exists():
        if any(out.iterdir()) and not config.exists():
            raise ConfigError(f"{out} is not empty and not an earlier demo's; name another folder with --out.")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    cache = out.parent / "stdlib"
    config.write_text(CONFIG.format(file=config, run=out / "run", cache=cache), encoding="utf-8")
    return config


def _run(*arguments: str) -> None:
    """Runs a tk command as a user would, its output on ours."""
    click.echo(f"$ tk {' '.join(arguments)}")
    done = subprocess.run([sys.executable, "-m", "tk", *arguments], check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode:
        raise TkError(f"`tk {' '.join(arguments)}` failed with exit code {done.returncode}; its message is above.")


def _timed_run(*arguments: str) -> float:
    start = time.monotonic()
    _run(*arguments)
    return time.monotonic() - start


@contextmanager
def _server(checkpoint: Path) -> Iterator[str]:
    """A `tk serve` process; yields its HOST:PORT and drains it at the end."""
    arguments = ["serve", str(checkpoint), "--kv-dtype", "int8", "--port", "0", "--max-model-len", "512"]
    click.echo(f"$ tk {' '.join(arguments)}")
    process = subprocess.Popen([sys.executable, "-m", "tk", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        ready = process.stdout.readline() if process.stdout else ""
        if not ready.startswith("ready "):
            raise TkError(f"The server ended with exit code {process.wait()} before it was ready; its message is above.")
        yield ready.split()[1]
        process.terminate()
        if process.wait(timeout=60) != 0:
            raise TkError(f"The server did not drain: exit code {process.returncode}.")
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
        raise TkError(f"The server at {address} says it is not ready: health status {answer.status}.")


@dataclass(frozen=True)
class Stream:
    """What a client saw of one prompt: seconds to the first token and for the rest."""

    prompt: str
    text: str
    num_tokens: int
    first_token_seconds: float
    decode_seconds: float


def _stream_all(address: str) -> list[Stream]:
    from ..infer.client import Client

    with Client(address, timeout=120) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda item: _stream(client, *item), enumerate(PROMPTS)))


def _stream(client: Any, seed: int, prompt: str) -> Stream:
    from ..infer.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_new_tokens=NEW_TOKENS)
    start = first = time.monotonic()
    text, num_tokens = "", 0
    for delta in client.stream(prompt, params):
        if not num_tokens:
            first = time.monotonic()
        text += delta.text
        num_tokens += len(delta.token_ids)
    return Stream(prompt, text, num_tokens, first - start, time.monotonic() - first)


def _trained(out: Path) -> dict[str, Any]:
    """First and last lines of the run's metrics."""
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    rates = sorted(line["tokens_per_second"] for line in steps[1:])
    return {
        "first": steps[0]["loss"],
        "last": steps[-1]["loss"],
        "held_out": next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line),
        "tokens": steps[-1]["tokens"],
        "rate": rates[len(rates) // 2],
    }


def _unigram_entropy(out: Path) -> float:
    """Of the held-out tokens: the loss of a model that knows only how often each token occurs."""
    from ..core.config import load_toml
    from ..train.config import TrainConfig
    from ..train.data.dataset import PackedDataset
    from ..train.data.stdlib import prepare_stdlib
    from ..train.data.unigram import unigram_entropy

    config = load_toml(out / "demo.toml", TrainConfig)
    tokens = prepare_stdlib(Path(config.data.cache), config.data.vocab_size).tokens
    held_out = PackedDataset([(tokens, 1.0)], config.train.seq_len, 0, "eval", config.data.eval_fraction)
    return unigram_entropy(held_out)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _show_table(out: Path, trained: dict[str, Any], reshard_seconds: float, streams: list[Stream], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..checkpoint import Checkpoint
    from ..infer.memory_plan import plan_memory
    from ..infer.options import EngineOptions
    from ..model.config import ModelConfig
    from ..model.registry import count_parameters

    checkpoint = Checkpoint.open(out / "run")
    config = ModelConfig.from_json(checkpoint.config())
    options = EngineOptions(out / "tp1", kv_blocks=64)
    int8, bf16 = (plan_memory(config, options, "bf16", kv_dtype).kv_bytes_per_token for kv_dtype in ("int8", "bf16"))
    decode = max(stream.decode_seconds for stream in streams)
    rows = {
        "parameters": f"{count_parameters(config):,}",
        "training loss": f"{trained['first']:.3f} -> {trained['last']:.3f}",
        "held-out loss": f"{trained['held_out']:.3f} nats per token (unigram entropy {_unigram_entropy(out):.3f})",
        "training speed": f"{trained['rate']:,.0f} tokens/s, {trained['tokens']:,} tokens",
        "checkpoint": f"{format_bytes(_folder_bytes(checkpoint.path))} at tp 2, ZeRO-1",
        "resharded": f"{format_bytes(_folder_bytes(out / 'tp1'))} at tp 1, in {format_seconds(reshard_seconds)}",
        "first token": format_seconds(sorted(stream.first_token_seconds for stream in streams)[len(streams) // 2]),
        "decode": f"{sum(stream.num_tokens - 1 for stream in streams) / decode:,.0f} tokens/s, {len(streams)} streams",
        "KV cache": f"{int8} bytes per token in int8, {bf16} in bf16 ({int8 / bf16:.0%})",
        "whole demo": format_seconds(seconds),
    }
    table = Table(show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    click.echo(
        "Next:\n"
        f"  tk generate {out / 'tp1'} 'def main():' --max-new-tokens 60\n"
        f"  tk serve {out / 'run'} --tp 2 --kv-dtype int8\n"
        f"  tk export {out / 'run'} {out / 'hugging-face'}\n"
        f"  tk train {out / 'demo.toml'} --set train.steps=700"
    )
