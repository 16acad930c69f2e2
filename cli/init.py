"""`tk init`: writes a configuration for a user's text or model, with sizes that fit both and this machine."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ..core.errors import ConfigError
from ..core.progress import format_bytes, format_count
from .common import PATH, PATH_TEXT
from .init_toml import toml_of
from .invocation import suggest

if TYPE_CHECKING:
    from ..data.corpus_facts import CorpusFacts
    from ..train.planning.first_run import Budget, FirstRun, Model

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@click.command(epilog="Example: tk init mine --text books/")
@click.argument("name", default="mine")
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="FILE|FOLDER",
    type=PATH_TEXT,
    help="Text or rows to train on; repeatable.",
)
@click.option("--model", metavar="CKPT", type=PATH, help="Checkpoint to fine-tune; without it, a new model is trained.")
@click.option("--lora", is_flag=True, help="Train an adapter, even where memory suffices for the whole model.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="N",
    help="Time for training, roughly.",
)
def init(name: str, texts: tuple[str, ...], model: Path | None, lora: bool, minutes: float) -> None:
    """Write NAME.toml for `tk train`, and print the commands that come next.

    A text is a file of text or of rows, or a folder of them, as for `tk data prepare`; without --text, it is the
    sources of Python's standard library. The size of the model, the vocabulary, the batches and the number of steps
    follow from the amount of text, this machine and --minutes; a comment explains every key.
    """
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"NAME {name!r} becomes part of file names: write letters, digits, '.', '_' and '-'.")
    if model and not texts:
        raise click.UsageError("--model needs --text: the texts, or the rows of questions and answers, to train it on.")
    if lora and not model:
        raise click.UsageError("--lora needs --model: an adapter changes a model that is there.")
    _refuse_existing(name)
    from ..data.corpus_facts import corpus_facts
    from ..data.sources import STDLIB, find_corpus
    from ..train.planning.first_run import fine_tuning, from_scratch

    text, budget = corpus_facts(find_corpus(texts or (STDLIB,))), _this_machine(minutes)
    if model:
        tuned, tokenizer = _model(name, model, text)
        run = fine_tuning(name, text, budget, tuned, lora)
        if tuned.tokenizer:
            _write_tokenizer(tokenizer, tuned.tokenizer)
            tokenizer = tuned.tokenizer
    elif text.examples:
        raise ConfigError("The text has questions and answers, which continue a model: name one with --model.")
    else:
        run = from_scratch(name, text, budget, [{"path": f"{name}-tokens"}] if texts else STDLIB)
        tokenizer = f"{name}-tokenizer"
    commands = _commands(name, texts, run, tokenizer)
    facts = _facts(run, text, budget)
    Path(f"{name}.toml").write_text(toml_of(run.values, _heading(facts, commands)), encoding="utf-8")
    click.echo(f"{name}.toml: {facts}")
    suggest(*commands)


def _refuse_existing(name: str) -> None:
    """Raises ConfigError if something that the run will make exists already."""
    for path in map(Path, (f"{name}.toml", f"{name}-tokenizer", f"{name}-tokens", f"runs/{name}")):
        if path.exists():
            raise ConfigError(f"{path} exists already: choose another NAME, or move it away.")


def _this_machine(minutes: float) -> "Budget":
    from ..core.cores import usable_cores
    from ..core.cpu import read_cpu
    from ..core.cuda import count_gpus, free_gpu_memory
    from ..core.machine_memory import machine_memory
    from ..train.planning.first_run import Budget

    gpus = count_gpus()
    memory = min(free_gpu_memory(gpus)) if gpus else machine_memory()
    has_bf16 = not {"avx512_bf16", "amx"}.isdisjoint(read_cpu().instruction_sets)
    return Budget(usable_cores(), memory, gpus, has_bf16, minutes)


def _model(name: str, given: Path, text: "CorpusFacts") -> "tuple[Model, str]":
    """Returns the model to fine-tune, and the folder of its tokenizer."""
    from ..checkpoint import Checkpoint
    from ..model.stored_config import stored_config
    from ..text.tokenizer_files import TextFiles, has_chat_template
    from ..train.planning.first_run import Model

    checkpoint = Checkpoint.open(given)
    shape = stored_config(checkpoint)
    lacks = text.chats and not has_chat_template(TextFiles.read(checkpoint.path))
    own = f"{name}-tokenizer" if lacks else ""
    return Model(str(given), own, shape.hidden_size, shape.context_length), str(checkpoint.path)


def _write_tokenizer(model: str, out: str) -> None:
    from ..data.chat_tokenizer import write_chat_tokenizer

    write_chat_tokenizer(Path(model), Path(out))
    click.echo(f"{out}: the model's tokenizer with a plain chat template, since the model has none")


def _commands(name: str, texts: Sequence[str], run: "FirstRun", tokenizer: str) -> list[str]:
    """Returns the commands that come next, in their order."""
    plan = run.plan
    ranks = f" --nproc {plan.layout.world_size}" if plan.layout.world_size > 1 else ""
    inputs, is_adapter = shlex.join(texts), "lora" in run.values
    learn = f"tk tokenizer train {inputs} --vocab-size {run.vocab_size} --out {tokenizer}"
    base = run.values["model"].get("init", "")
    served = f"{shlex.quote(base)} --adapter {name}=runs/{name}" if is_adapter else f"runs/{name}"
    return [
        *([learn] if texts and run.vocab_size else []),
        *([f"tk data prepare {inputs} --tokenizer {shlex.quote(tokenizer)} --out {name}-tokens"] if texts else []),
        f"tk train {name}.toml{ranks}",
        f"tk serve {served} --http 8000",
    ]


def _facts(run: "FirstRun", text: "CorpusFacts", budget: "Budget") -> str:
    """Returns a sentence on the run."""
    plan = run.plan
    machine = format_count(budget.num_gpus, "GPU") if budget.num_gpus else format_count(budget.cores, "core")
    minutes = max(1, round(budget.minutes * plan.flops_per_step * plan.steps / budget.flops))
    kind = "an adapter of" if "lora" in run.values else "all of" if "init" in run.values["model"] else "a new model of"
    return (
        f"{kind} {plan.num_parameters / 1e6:,.1f} M parameters, {plan.steps:,} steps of {plan.tokens_per_step:,} "
        f"tokens, for {format_bytes(text.num_bytes)} of text; about {format_count(minutes, 'minute')} on {machine}"
    )


def _heading(facts: str, commands: Sequence[str]) -> list[str]:
    return [
        f"Written by `tk init`: {facts}.",
        "Change what you like; docs/training/configuration.md has every key. The commands that use it:",
        *(f"  {command}" for command in commands),
    ]
