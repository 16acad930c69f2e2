"""`tk generate`: the continuation of a prompt, from a server or from a checkpoint."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import ConfigError
from ..core.given_files import read_given_text
from .adapter_options import AdaptedModel, adapted_model, base_option
from .common import PATH_TEXT, PathType, print_json
from .connection_options import connection_options, take_credentials
from .engine_options import (
    batch_invariant_option,
    draft_option,
    draft_weight_dtype_option,
    dtype_option,
    kernels_option,
    kv_dtype_option,
    kv_memory_option,
    max_model_len_option,
    numa_option,
    packed_option,
    speculate_option,
    threads_option,
    tp_option,
    weight_dtype_option,
)
from .hinted_command import PromptCommand
from .invocation import say

if TYPE_CHECKING:
    from ..infer.client.client import Client
    from ..infer.client.connection import Credentials
    from ..infer.engine.llm import LLM
    from ..infer.engine.request.completion import Completion
    from ..infer.engine.request.events import ModelInfo
    from ..infer.engine.request.prompts import Conversation

_ADDRESS = re.compile(r"(\[[^\]/]+\]|[^:/\[\]]+):\d{1,5}")
_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "json_schema", "regex", "grammar")
_TEXT_FILE = PathType(exists=True, dir_okay=False, path_type=Path)


@click.command(
    cls=PromptCommand,
    epilog='\b\nExamples:\n  tk generate runs/demo/run "def main(" --max-new-tokens 50\n'
    '  tk generate models/base --adapter runs/sql "SELECT"\n  tk generate runs/sql "SELECT"',
)
@click.argument("source", metavar="CKPT|HOST:PORT", type=PATH_TEXT)
@click.argument("prompt", required=False)
@click.option(
    "--max-new-tokens", metavar="N", type=click.IntRange(1), help="Most tokens to generate; default: as many as fit."
)
@click.option(
    "--temperature",
    metavar="T",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Sampling temperature; 0: greedy.",
)
@click.option(
    "--top-k",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    help="Sample from the K most probable tokens; 0: from all.",
)
@click.option(
    "--top-p",
    metavar="P",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Sample from the most probable tokens with this total probability.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0, 2**64 - 1),
    help="Seed of sampling; the same seed gives the same text.",
)
@click.option("--no-prefix-cache", "bypass", is_flag=True, help="Compute the whole PROMPT, whatever is cached.")
@click.option("--chat", is_flag=True, help="Take PROMPT as a user's message, in the model's chat template.")
@click.option("--json-schema", type=_TEXT_FILE, help="Write JSON that the JSON Schema in this file accepts.")
@click.option("--regex", metavar="PATTERN", help="Write a text that this regular expression matches as a whole.")
@click.option("--grammar", type=_TEXT_FILE, help="Write a text of the grammar in this file, in Lark's syntax.")
@click.option(
    "--adapter", metavar="CKPT|NAME", type=PATH_TEXT, help="Adapter of CKPT; of a server, the name of one that it has."
)
@base_option
@tp_option
@threads_option
@dtype_option
@weight_dtype_option
@kv_dtype_option
@kv_memory_option
@max_model_len_option
@speculate_option
@draft_option
@draft_weight_dtype_option
@numa_option
@packed_option
@kernels_option
@batch_invariant_option
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, which describes the model too.")
def generate(source: str, prompt: str | None, chat: bool, bypass: bool, as_json: bool, **options: Any) -> None:
    """Continue PROMPT, or the text on stdin, and stream the continuation to stdout.

    The model is the one that a server at HOST:PORT serves, or CKPT: a step folder, a run folder or a Hugging Face
    folder. A CKPT that is an adapter answers on its base. The options from --base to --batch-invariant are for a CKPT;
    a server has its own. The token for a server that needs one is read from the environment variable TK_TOKEN.
    """
    from ..infer.engine.request.request import CacheOptions
    from ..infer.engine.request.sampling_params import SamplingParams

    params = SamplingParams(**{name: _text_of(options.pop(name)) for name in _SAMPLING})
    credentials, adapter = take_credentials(options), options.pop("adapter") or ""
    loading = {name: value for name, value in options.items() if value is not None}
    cache = CacheOptions(bypass=bypass)
    text = _read_stdin() if prompt is None else prompt
    if source.startswith(("http://", "https://")):
        raise ConfigError(
            f"{source} is an address of HTTP; name the server's port of gRPC as HOST:PORT, without http://."
        )
    address = not Path(source).exists() and _ADDRESS.fullmatch(source) is not None
    if address:
        _refuse_loading(source, loading)
    local = None
    if not address:
        local = adapted_model(Path(source), loading.pop("base", None), Path(adapter) if adapter else None)
        adapter = local.request_adapter
    given = _chat(local, text) if chat else text
    with _opened(source, local, loading, credentials) as model:
        if as_json:
            [completion] = model.generate([given], params, cache, adapter)
            print_json(_document(text, completion, model.model_info()))
            return
        for delta in model.stream(given, params, cache, adapter):
            click.echo(delta.text, nl=False)
        click.echo()


def _text_of(value: Any) -> Any:
    """Returns the text of a file, and any other value as it is.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    if not isinstance(value, Path):
        return value
    try:
        return read_given_text(value)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {value}: {error}.") from error


def _read_stdin() -> str:
    """Reads the prompt from stdin, without the newline that `echo` adds.

    Raises:
        ConfigError: stdin is closed or empty.
    """
    if sys.stdin is None:
        raise ConfigError("There is no prompt, and stdin is closed: pass the prompt as an argument or on stdin.")
    if sys.stdin.isatty():
        say("prompt (end with Ctrl-D):")
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("The prompt is empty: pass it as an argument or on stdin.")
    return text


def _refuse_loading(address: str, given: Mapping[str, Any]) -> None:
    """Refuses options that decide how a model is loaded, for an address."""
    if given:
        name = "--" + next(iter(given)).replace("_", "-")
        raise ConfigError(f"{name} is for a CKPT; the server at {address} has loaded its model already.")


def _chat(local: AdaptedModel | None, message: str) -> "Conversation | list[int]":
    """Returns a conversation that the message begins; of a checkpoint its tokens, before the model is loaded.

    Raises:
        CheckpointError: the checkpoint has no tokenizer or no chat template.
        ConfigError: the chat template refuses the message.
    """
    from ..infer.engine.request.prompts import Conversation

    conversation = Conversation([{"role": "user", "content": message}])
    if local is None:
        return conversation
    from ..checkpoint import Checkpoint
    from ..text.tokenizer import Tokenizer

    checkpoint = Checkpoint.open(local.path)
    return Tokenizer.from_folder(checkpoint.path).encode_chat(conversation.messages)


@contextmanager
def _opened(
    source: str, local: AdaptedModel | None, loading: Mapping[str, Any], credentials: "Callable[[], Credentials]"
) -> "Iterator[Client | LLM]":
    """Yields a client for an address, or an engine for a path."""
    if local is None:
        from ..infer.client.client import Client

        with Client(source, credentials=credentials()) as client:
            yield client
    else:
        from ..infer.engine.llm import LLM

        with LLM(local.path, **loading, **local.options) as llm:
            yield llm


def _document(prompt: str, completion: "Completion", info: "ModelInfo") -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "matched": completion.matched,
        "seed": completion.seed,
        "request_id": completion.request_id,
        "step": completion.step,
        "adapter_sha256": completion.adapter_sha256,
        "usage": asdict(completion.usage),
        "timing": asdict(completion.timing),
        "model": asdict(info),
    }
