"""`tk train`: one training run, on local ranks that it starts or as one rank of a torchrun job."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.errors import TkError
from ..core.process import lasting_imports
from .common import PATH, PATH_TEXT
from .hinted_command import ConfigCommand
from .invocation import note

if TYPE_CHECKING:
    from ..train.config.train_config import TrainConfig


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
) -> None:
    """Train the model that CONFIG (TOML) describes, and save checkpoints in its run folder.

    The first Ctrl-C finishes the current step, saves and exits with 130; the second ends the run at once. Under
    torchrun (RANK and WORLD_SIZE are set) this process joins that job as one rank.
    """
    from ..train.launch.gpus import require_gpus
    from ..train.launch.launcher import FORK, Launcher
    from ..train.planning.plan import make_plan
    from ..train.planning.plan_text import describe

    if fork and resume in ("auto", "never"):
        raise click.UsageError(f"--fork needs a checkpoint to fork from: pass --resume CKPT instead of {resume!r}.")
    joined = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    loaded = _load(config, overrides, deepspeed, int(os.environ["WORLD_SIZE"]) if joined else nproc)
    if joined and dry_run:
        raise click.UsageError(
            "--dry-run starts no rank: run it without torchrun, with --nproc for the number of ranks."
        )
    if joined:
        with lasting_imports():
            from ..train.launch.worker import run_rank
        ctx.exit(run_rank(loaded, resume, fork))
    _check_surroundings(loaded, resume)
    plan = make_plan(loaded, nproc, resume, here=True)  # raises what ranks would raise, before they are started
    require_gpus(plan.layout.world_size)
    if dry_run:
        click.echo(describe(plan))
        return
    arguments = [json.dumps(loaded.model_dump(mode="json")), resume, *([FORK] if fork else [])]
    logs = loaded.run_folder / "logs"
    try:
        code = Launcher(
            "tk.train.launch.rank",
            arguments,
            plan.layout.world_size,
            logs,
            loaded.train.stop_timeout,
            loaded.parallel.timeout_seconds,
        ).run()
    except TkError:
        _clear_leftovers(loaded.run_folder)
        raise
    ctx.exit(code)


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
