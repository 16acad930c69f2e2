"""`tk generate`: text from a server or straight from a checkpoint."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import ConfigError
from .common import print_json

if TYPE_CHECKING:
    from ..infer.client import Client
    from ..infer.completion import Completion
    from ..infer.events import ModelInfo
    from ..infer.llm import LLM

_ADDRESS = re.compile(r"(\[[^\]/]+\]|[^:/\[\]]+):\d{1,5}")


@click.command(epilog='Example: tk generate runs/demo "def main(" --max-new-tokens 50')
@click.argument("source", metavar="CKPT|HOST:PORT")
@click.argument("prompt", required=False)
@click.option("--max-new-tokens", type=click.IntRange(1), help="At most so many; as many as fit if not given.")
@click.option("--temperature", type=click.FloatRange(0), default=1.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="Keep the K most probable tokens; 0: all.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Keep the top share of mass.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="The same seed gives the same text.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with what was served.")
def generate(source: str, prompt: str | None, as_json: bool, **sampling: Any) -> None:
    """Continue PROMPT, or stdin without one, and stream the text to stdout.

    The model is the one served at HOST:PORT, or CKPT: a step folder, a run folder or a Hugging Face folder.
    """
    from ..infer.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    text = _read_stdin() if prompt is None else prompt
    with _opened(source) as model:
        if as_json:
            [completion] = model.generate(text, params)
            print_json(_document(text, completion, model.model_info()))
            return
        for delta in model.stream(text, params):
            click.echo(delta.text, nl=False)
        click.echo()


def _read_stdin() -> str:
    """The prompt, less the newline that `echo` puts at its end."""
    if sys.stdin is None:
        raise ConfigError("There is no prompt, and stdin is closed: pass it as an argument or on stdin.")
    if sys.stdin.isatty():
        click.echo("prompt (end with Ctrl-D):", err=True)
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("There is no prompt: pass it as an argument or on stdin.")
    return text


@contextmanager
def _opened(source: str) -> "Iterator[Client | LLM]":
    """A client for an address, an engine of our own for a path; a path that exists is a path."""
    if not Path(source).exists() and _ADDRESS.fullmatch(source):
        from ..infer.client import Client

        with Client(source) as client:
            yield client
    else:
        from ..infer.llm import LLM

        with LLM(source) as llm:
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
