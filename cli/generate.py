"""`tk generate`: the continuation of a prompt, from a server or from a checkpoint."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import ConfigError
from ..infer.options import KERNELS
from .common import print_json

if TYPE_CHECKING:
    from ..infer.api.client import Client
    from ..infer.api.llm import LLM
    from ..infer.requests.completion import Completion
    from ..infer.requests.events import ModelInfo

_ADDRESS = re.compile(r"(\[[^\]/]+\]|[^:/\[\]]+):\d{1,5}")


@click.command(epilog='Example: tk generate runs/demo "def main(" --max-new-tokens 50')
@click.argument("source", metavar="CKPT|HOST:PORT")
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=click.IntRange(1), help="Most tokens to generate; default: as many as fit.")
@click.option(
    "--temperature", type=click.FloatRange(0), default=1.0, show_default=True, help="Sampling temperature; 0: greedy."
)
@click.option("--top-k", type=click.IntRange(0), default=0, help="Sample from the K most probable tokens; 0: from all.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Sample from the most probable tokens with this total probability.",
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Seed of sampling; the same seed gives the same text.")
@click.option(
    "--kernels",
    type=click.Choice(KERNELS),
    default="auto",
    help="What computes, for a CKPT; auto: the best on this machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, which describes the model too.")
def generate(source: str, prompt: str | None, kernels: str, as_json: bool, **sampling: Any) -> None:
    """Continue PROMPT, or the text on stdin, and stream the continuation to stdout.

    The model is the one that a server at HOST:PORT serves, or CKPT: a step folder, a run folder or a Hugging Face
    folder.
    """
    from ..infer.requests.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    text = _read_stdin() if prompt is None else prompt
    with _opened(source, kernels) as model:
        if as_json:
            [completion] = model.generate(text, params)
            print_json(_document(text, completion, model.model_info()))
            return
        for delta in model.stream(text, params):
            click.echo(delta.text, nl=False)
        click.echo()


def _read_stdin() -> str:
    """Reads the prompt from stdin, without the newline that `echo` adds.

    Raises:
        ConfigError: stdin is closed or empty.
    """
    if sys.stdin is None:
        raise ConfigError("There is no prompt, and stdin is closed: pass the prompt as an argument or on stdin.")
    if sys.stdin.isatty():
        click.echo("prompt (end with Ctrl-D):", err=True)
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("The prompt is empty: pass it as an argument or on stdin.")
    return text


@contextmanager
def _opened(source: str, kernels: str) -> "Iterator[Client | LLM]":
    """Yields a client for an address, or an engine for a path; a path that exists wins over an address.

    Raises:
        ConfigError: kernels are given for an address.
    """
    if not Path(source).exists() and _ADDRESS.fullmatch(source):
        if kernels != "auto":
            raise ConfigError(f"--kernels is for a CKPT; the server at {source} has chosen its own.")
        from ..infer.api.client import Client

        with Client(source) as client:
            yield client
    else:
        from ..infer.api.llm import LLM

        with LLM(source, kernels=kernels) as llm:
            yield llm


def _document(prompt: str, completion: "Completion", info: "ModelInfo") -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "seed": completion.seed,
        "request_id": completion.request_id,
        "usage": asdict(completion.usage),
        "timing": asdict(completion.timing),
        "model": asdict(info),
    }
