"""`tk plan`: the memory, idle time and traffic that a run needs, or the memory that serving a checkpoint needs."""

from pathlib import Path
from typing import Any

import click

from ..core.cuda import Gpu
from ..core.errors import ParallelError
from ..core.progress import format_bytes
from .common import PATH, print_json
from .engine_options import QUANTIZED_DTYPES
from .fit_options import FitOptions, fit_options
from .gpu_option import GpuType, installed_torch, planned_gpu
from .hinted_command import ConfigCommand

SERVING_TPS = (1, 2, 4, 8)


@click.command(
    cls=ConfigCommand,
    epilog="\b\nExamples:\n  tk plan examples/llama-1b.toml --nproc 8 --set zero.stage=3\n  tk plan runs/demo/run",
)
@click.argument("path", metavar="CONFIG.toml|CKPT", type=PATH)
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one key of CONFIG.")
@click.option(
    "--nproc", metavar="N", type=click.IntRange(1), help="Number of ranks; default: as many as the layout needs."
)
@click.option("--weight-dtype", type=QUANTIZED_DTYPES, help="Of a checkpoint's weights; default: auto, as stored.")
@fit_options
@click.option("--gpu", type=GpuType(), metavar="CARD", help="Show the kernels of attention on it: H100, 9.0, ...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan(
    path: Path,
    overrides: tuple[str, ...],
    nproc: int | None,
    weight_dtype: str | None,
    gpu: Gpu | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show a training run's memory per rank, what it moves and sends, and the idle time of its pipeline.

    No rank is started, and every problem is listed. With --fit, the run is shown with the least [offload] that fits;
    the exit code is 1 if none does. For a checkpoint, show the memory per rank that serving it needs.
    """
    fit = FitOptions(**options)
    if path.suffix == ".toml":
        if weight_dtype is not None:
            raise click.UsageError(
                f"--weight-dtype applies to a checkpoint, and {path} is a configuration of training."
            )
        _training(path, overrides, nproc, fit, gpu, as_json)
    elif overrides or nproc is not None or fit.given or gpu:
        raise click.UsageError(
            f"Only --weight-dtype and --json apply to a checkpoint, and {path} is taken as one, not as a CONFIG.toml."
        )
    else:
        _serving(path, weight_dtype or "auto", as_json)


def _training(
    path: Path, overrides: tuple[str, ...], nproc: int | None, options: FitOptions, gpu: Gpu | None, as_json: bool
) -> None:
    from ..core.config import load_toml
    from ..train.config.train_config import TrainConfig
    from ..train.planning.fit import least_offload
    from ..train.planning.gpu_plan import plan_gpu
    from ..train.planning.longest_row import longest_row
    from ..train.planning.plan import plan_of
    from ..train.planning.plan_text import describe
    from ..train.planning.planned_run import prepare_run

    run = prepare_run(load_toml(path, TrainConfig, overrides), nproc)
    found = least_offload(run, options.limit, options.machines) if options.limit else None
    made = plan_of(found.run if found else run)
    card = planned_gpu(gpu)
    on_gpu = plan_gpu(run, card, installed_torch()) if card else None
    longest = longest_row(found.run, options.limit, options.machines) if found and options.limit else 0
    if as_json:
        facts = {"fits": found.fits, "fit": found.text, "longest_row": longest} if found else {}
        print_json(made.to_json() | facts | ({"gpu": on_gpu.to_json()} if on_gpu else {}))
    else:
        answer = f"\n{'fit':<11}{found.text}\n{'rows':<11}Rows of up to {longest:,} tokens fit then." if found else ""
        of_gpu = "\n".join(["", *on_gpu.lines()]) if on_gpu else ""
        click.echo(describe(made, options.machines) + of_gpu + answer)
    if found and not found.fits:
        click.get_current_context().exit(1)


def _serving(path: Path, weight_dtype: str, as_json: bool) -> None:
    from ..checkpoint import Checkpoint
    from ..infer.engine.kv_formats import KV_DTYPES
    from ..model.stored_config import stored_config

    checkpoint = Checkpoint.open(path)
    config = stored_config(checkpoint)
    rows = [_row(config, tp, weight_dtype, KV_DTYPES) for tp in SERVING_TPS]
    weights = config.dtype_name if weight_dtype == "auto" else weight_dtype
    if as_json:
        print_json({"path": str(checkpoint.path), "dtype": config.dtype_name, "weight_dtype": weights, "serving": rows})
        return
    dtypes = f"{config.architecture} in {config.dtype_name}, weights in {weights}"
    click.echo(f"{checkpoint.path}, {dtypes}; per rank, KV cache per token:")
    click.echo(f"{'tp':>4}{'weights':>12}" + "".join(f"{'KV ' + name:>12}" for name in KV_DTYPES))
    for row in rows:
        if "problem" in row:
            click.echo(f"{row['tp']:>4}  {row['problem']}")
        else:
            cells = [row["weight_bytes"], *row["kv_bytes_per_token"].values()]
            click.echo(f"{row['tp']:>4}" + "".join(f"{format_bytes(size):>12}" for size in cells))


def _row(config: Any, tp: int, weight_dtype: str, kv_dtypes: tuple[str, ...]) -> dict[str, Any]:
    from ..infer.engine.planning.model_bytes import kv_bytes_per_rank, weight_bytes_per_rank

    try:
        weights = weight_bytes_per_rank(config, tp, config.dtype_name, weight_dtype)
    except ParallelError as error:
        return {"tp": tp, "problem": str(error)}
    kv = {name: kv_bytes_per_rank(config, tp, name) for name in kv_dtypes}
    return {"tp": tp, "weight_bytes": weights, "kv_bytes_per_token": kv}
