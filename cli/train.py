"""`tk train`: one training run, on local ranks that it starts or as one rank of a torchrun job."""

import json
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.errors import TkError
from ..core.process import lasting_imports
from .common import PATH, PATH_TEXT, print_json
from .hinted_command import ConfigCommand
from .invocation import note
from .train_report import show_result

if TYPE_CHECKING:
    from ..train.config.train_config import TrainConfig
    from ..train.planning.plan import RunPlan


@click.command(
    cls=ConfigCommand,
    epilog="\b\nExamples:\n  tk train runs/demo/demo.toml --set train.steps=700\n"
    "  tk train examples/tiny.toml --set parallel.tp=2 --nproc 4",
)
@click.argument("config", type=PATH)
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one key of CONFIG.")
@click.option(
    "--nproc",
    metavar="N",
    type=click.IntRange(1),
    help="Local ranks to start; default: as many as the configuration's layout has.",
)
@click.option(
    "--resume",
    default="auto",
    show_default=True,
    metavar="auto|never|CKPT",
    type=PATH_TEXT,
    help="auto: from the newest good step of the run folder; never: start anew, in a folder without steps; or CKPT.",
)
@click.option(
    "--fork",
    is_flag=True,
    help="With --resume CKPT: move the run folder's newer steps to forked-*/ instead of failing.",
)
@click.option(
    "--deepspeed",
    type=PATH,
    metavar="FILE.json",
    help="DeepSpeed configuration whose settings are added to CONFIG; --set overrides both.",
)
@click.option("--dry-run", is_flag=True, help="Check what can be checked before ranks start, print the plan, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print each event of the run, and its result, as a line of JSON.")
@click.pass_context
def train(
    ctx: click.Context,
    config: Path,
    overrides: tuple[str, ...],
    nproc: int | None,
    resume: str,
    fork: bool,
    deepspeed: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train the model that CONFIG (TOML) describes, and save checkpoints in its run folder.

    The first Ctrl-C finishes the current step, saves and exits with 130; the second ends the run at once. Under
    torchrun (RANK and WORLD_SIZE are set) this process joins that job as one rank.
    """
    from ..train.launch.gpus import require_gpus
    from ..train.launch.launcher import EVENTS, FORK
    from ..train.planning.plan import make_plan
    from ..train.planning.plan_text import describe

    if fork and resume in ("auto", "never"):
        raise click.UsageError(f"--fork needs a checkpoint to fork from: pass --resume CKPT instead of {resume!r}.")
    joined, start = "RANK" in os.environ and "WORLD_SIZE" in os.environ, time.monotonic()
    loaded = _load(config, overrides, deepspeed, int(os.environ["WORLD_SIZE"]) if joined else nproc)
    if joined and dry_run:
        raise click.UsageError(
            "--dry-run starts no rank: run it without torchrun, with --nproc for the number of ranks."
        )
    if joined:
        code = _join(loaded, resume, fork, as_json)
    else:
        _check_surroundings(loaded, resume)
        plan = make_plan(loaded, nproc, resume, here=True)  # raises what ranks would raise, before they are started
        require_gpus(plan.layout.world_size)
        if dry_run:
            print_json(plan.to_json()) if as_json else click.echo(describe(plan))
            return
        flags = [flag for flag, is_set in ((FORK, fork), (EVENTS, as_json)) if is_set]
        code = _launch(loaded, plan, resume, flags)
    if not joined or os.environ["RANK"] == "0":
        again = "" if joined else _again(config, overrides, nproc, deepspeed)
        show_result(loaded, time.monotonic() - start, as_json, again)
    ctx.exit(code)


def _join(config: "TrainConfig", resume: str, fork: bool, as_json: bool) -> int:
    """Trains as one rank of torchrun's job; returns the exit code."""
    from ..train.launch.gpus import gpu_environment

    os.environ.update(gpu_environment(config, os.environ))  # before torch reads it
    with lasting_imports():
        from ..train.launch.worker import run_rank
    from ..core.console_log import show_log, shown_form
    from ..train.records.run_events import events_on_stdout

    show_log(shown_form(), {"rank": int(os.environ["RANK"])})
    with events_on_stdout() if as_json else nullcontext():
        return run_rank(config, resume, fork)


def _launch(config: "TrainConfig", plan: "RunPlan", resume: str, flags: Sequence[str]) -> int:
    """Trains on local ranks; returns the exit code."""
    from ..core.console_log import shown_form
    from ..train.launch.gpus import gpu_environment
    from ..train.launch.launcher import Launcher
    from ..train.launch.rank_report import MemoryExhausted
    from ..train.planning.relief import largest_part

    arguments = [json.dumps(config.model_dump(mode="json")), resume, shown_form() or "text", *flags]
    logs, timeouts = config.run_folder / "logs", (config.train.stop_timeout, config.parallel.timeout_seconds)
    try:
        environment = gpu_environment(config, os.environ)
        return Launcher("tk.train.launch.rank", arguments, plan.layout.world_size, logs, *timeouts, environment).run()
    except TkError as error:
        _clear_leftovers(config.run_folder)
        if isinstance(error, MemoryExhausted):
            raise MemoryExhausted(f"{error} {largest_part(plan.memory)}") from error
        raise


def _again(config: Path, overrides: Sequence[str], nproc: int | None, deepspeed: Path | None) -> str:
    """Returns the command that continues the run."""
    words = ["tk", "train", str(config), *(word for each in overrides for word in ("--set", each))]
    words += ["--nproc", str(nproc)] if nproc else []
    words += ["--deepspeed", str(deepspeed)] if deepspeed else []
    return shlex.join(words)


def _load(config: Path, overrides: tuple[str, ...], deepspeed: Path | None, num_ranks: int | None) -> "TrainConfig":
    """Returns the configuration: the TOML file, with the DeepSpeed file's settings, and with overrides of both."""
    from ..core.config import apply_overrides, load_toml, parse, read_toml
    from ..train.config.deepspeed.config import map_deepspeed, merge, read_deepspeed
    from ..train.config.train_config import TrainConfig

    ours = load_toml(config, TrainConfig, overrides)
    if deepspeed is None:
        return ours
    dp = ours.layout(num_ranks).dp
    mapped = map_deepspeed(read_deepspeed(deepspeed), str(deepspeed), dp, ours.train.micro_batch_size)
    data = read_toml(config)
    notes = [*mapped.notes, *merge(data, mapped, str(config), str(deepspeed))]
    apply_overrides(data, overrides)
    if os.environ.get("RANK", "0") == "0":
        for each in notes:
            note(f"{deepspeed}: {each}")
    return parse(data, TrainConfig, f"{config} with {deepspeed}")


def _check_surroundings(config: "TrainConfig", resume: str) -> None:
    """Checks, before any rank is started, the checkpoint and the packages that the run needs; `make_plan` checks data.

    Raises:
        ConfigError: an optional package is missing.
        CheckpointError: the checkpoint to resume from cannot be opened.
    """
    from ..checkpoint import Checkpoint
    from ..train.config.extras import require_tensorboard

    if config.metrics.tensorboard:
        require_tensorboard()
    if resume not in ("auto", "never"):
        Checkpoint.open(resume)


def _clear_leftovers(run: Path) -> None:
    """Removes the incomplete folder that a failed save leaves, perhaps on a full disk, by taking the run's lock.

    The run folder may have been moved while the job trained; then nothing is made in its place.
    """
    from ..checkpoint.run.run_folder import RunFolder
    from ..checkpoint.run.run_lock import LOCK
    from ..train.records.run_files import REPLACED

    with suppress(TkError, OSError):
        if (run / LOCK).exists():
            with RunFolder(run, REPLACED).lock():
                pass
