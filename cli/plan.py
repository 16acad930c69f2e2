"""`tk plan`: the memory, idle time and traffic that a run needs, or the memory that serving a checkpoint needs."""

from pathlib import Path
from typing import Any

import click

from ..core.cuda import Gpu
from ..core.errors import ParallelError
from ..core.progress import format_bytes
from .common import PATH, print_json
from .engine_options import QUANTIZED_DTYPES, draft_option, draft_weight_dtype_option
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
@draft_option
@draft_weight_dtype_option
@fit_options
@click.option("--gpu", type=GpuType(), metavar="CARD", help="Show the kernels of attention on it: H100, 9.0, ...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan(
    path: Path,
    overrides: tuple[str, ...],
    nproc: int | None,
    weight_dtype: str | None,
    draft: Path | None,
    draft_weight_dtype: str | None,
    gpu: Gpu | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show a training run's memory per rank, what it moves and sends, and the idle time of its pipeline.

    No rank is started, and every problem is listed. With --fit, the run is shown with the least [offload] that fits;
    the exit code is 1 if none does. For a checkpoint, show the memory per rank that serving it needs, with --draft that
    of a draft model too.
    """
    fit = FitOptions(**options)
    of_serving = {"weight_dtype": weight_dtype, "draft": draft, "draft_weight_dtype": draft_weight_dtype}
    if path.suffix == ".toml":
        for name, value in of_serving.items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{option} applies to a checkpoint, and {path} is a configuration of training.")
        _training(path, overrides, nproc, fit, gpu, as_json)
    elif overrides or nproc is not None or fit.given or gpu:
        raise click.UsageError(
            "Only --weight-dtype, --draft, --draft-weight-dtype and --json apply to a checkpoint, and "
            f"{path} is taken as one, not as a CONFIG.toml."
        )
    elif draft is None and draft_weight_dtype is not None:
        raise click.UsageError("--draft-weight-dtype is that of a draft; name it with --draft.")
    else:
        _serving(path, weight_dtype or "auto", draft, draft_weight_dtype or "auto", as_json)


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


def _serving(path: Path, weight_dtype: str, draft: Path | None, draft_weight_dtype: str, as_json: bool) -> None:
    from ..checkpoint import Checkpoint
    from ..infer.engine.kv_formats import KV_DTYPES
    from ..model.stored_config import stored_config

    checkpoint = Checkpoint.open(path)
    config = stored_config(checkpoint)
    rows = [_row(config, tp, weight_dtype, KV_DTYPES) for tp in SERVING_TPS]
    weights = config.dtype_name if weight_dtype == "auto" else weight_dtype
    beside = None if draft is None else _draft(draft, draft_weight_dtype, checkpoint.path, rows[0]["weight_bytes"])
    if as_json:
        facts = {"path": str(checkpoint.path), "dtype": config.dtype_name, "weight_dtype": weights, "serving": rows}
        print_json(facts | ({"draft": beside} if beside else {}))
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
    if beside:
        click.echo(
            f"{beside['path']}, a draft with weights in {beside['weight_dtype']}, in a process of its own: "
            f"{format_bytes(beside['weight_bytes'])} of weights, {beside['share']:.2f} of the model's, and "
            f"{format_bytes(beside['kv_bytes_per_token'])} of KV cache per token"
        )


def _draft(path: Path, weight_dtype: str, model: Path, model_bytes: int) -> dict[str, Any]:
    """Returns what a draft takes, which all ranks share on a CPU and the first GPU has elsewhere.

    Raises:
        ConfigError: it has other tokens than the model.
    """
    from ..checkpoint import Checkpoint
    from ..infer.engine.planning.draft import check_same_tokens
    from ..infer.engine.planning.model_bytes import kv_bytes_per_rank, weight_bytes_per_rank
    from ..model.stored_config import stored_config
    from ..text.tokenizer_files import TextFiles

    checkpoint = Checkpoint.open(path)
    config, of_model = stored_config(checkpoint), stored_config(Checkpoint.open(model))
    own, theirs = (TextFiles.read(folder) for folder in (checkpoint.path, model))
    check_same_tokens(own, theirs, (config.vocab_size, of_model.vocab_size))
    weights = weight_bytes_per_rank(config, 1, config.dtype_name, weight_dtype)
    return {
        "path": str(checkpoint.path),
        "dtype": config.dtype_name,
        "weight_dtype": config.dtype_name if weight_dtype == "auto" else weight_dtype,
        "weight_bytes": weights,
        "share": weights / model_bytes,
        "kv_bytes_per_token": kv_bytes_per_rank(config, 1, config.dtype_name),
    }


def _row(config: Any, tp: int, weight_dtype: str, kv_dtypes: tuple[str, ...]) -> dict[str, Any]:
    from ..infer.engine.planning.model_bytes import kv_bytes_per_rank, weight_bytes_per_rank

    try:
        weights = weight_bytes_per_rank(config, tp, config.dtype_name, weight_dtype)
    except ParallelError as error:
        return {"tp": tp, "problem": str(error)}
    kv = {name: kv_bytes_per_rank(config, tp, name) for name in kv_dtypes}
    return {"tp": tp, "weight_bytes": weights, "kv_bytes_per_token": kv}
