"""`tk eval`: the perplexity of text under a checkpoint, and how a dtype changes it."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..core.errors import ConfigError
from ..core.progress import progress_bar
from .adapter_options import AdaptedModel, adapted_model, base_option
from .common import PATH, print_json
from .corpus_report import ignore_option
from .engine_options import DTYPES, KV_CACHE_DTYPES, QUANTIZED_DTYPES, kernels_option, threads_option, tp_option

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..infer.engine.perplexity import EvalText
    from .eval_report import EvalRun

LONGEST_DEFAULT: Final = 2048  # tokens of context, where the model takes more
MAX_RUNNING: Final = 16  # windows at a time: they fill steps, and their cache stays small


@click.command(
    epilog="\b\nExamples:\n  tk eval runs/demo/run --data held-out.txt --kv-dtype auto --kv-dtype int8\n"
    "  tk eval models/base --adapter runs/sql --data held-out.txt"
)
@click.argument("checkpoint", metavar="CKPT", type=PATH)
@click.option(
    "--data",
    metavar="FILE",
    required=True,
    type=PATH,
    help='Text to measure: a text file, a file of rows with a "text" each, or a folder of `tk data prepare`.',
)
@click.option(
    "--context",
    metavar="N",
    type=click.IntRange(2),
    help=f"Tokens of a window; default: the model's limit, at most {LONGEST_DEFAULT}.",
)
@click.option(
    "--stride",
    metavar="N",
    type=click.IntRange(1),
    help="Tokens that a window scores; fewer give each more context; default: all.",
)
@click.option("--limit", metavar="N", type=click.IntRange(2), help="Read only so many tokens of the data.")
@ignore_option
@click.option("--adapter", metavar="CKPT", type=PATH, help="Adapter with which CKPT is measured.")
@base_option
@tp_option
@click.option("--dtype", "dtypes", type=DTYPES, multiple=True, help="Dtype of the computation; repeat it to compare.")
@click.option(
    "--weight-dtype",
    "weight_dtypes",
    type=QUANTIZED_DTYPES,
    multiple=True,
    help="Quantize weights at load; repeat to compare.",
)
@click.option(
    "--kv-dtype", "kv_dtypes", type=KV_CACHE_DTYPES, multiple=True, help="Of the KV cache; repeat to compare."
)
@kernels_option
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def evaluate(
    checkpoint: Path,
    data: Path,
    context: int | None,
    stride: int | None,
    limit: int | None,
    ignored: tuple[str, ...],
    adapter: Path | None,
    base: Path | None,
    dtypes: tuple[str, ...],
    weight_dtypes: tuple[str, ...],
    kv_dtypes: tuple[str, ...],
    as_json: bool,
    **engine_values: Any,
) -> None:
    """Measure the perplexity of text under CKPT: a step folder, a run folder or a Hugging Face folder.

    Text is cut into windows of --context tokens, in which every token but a text's first is scored once. With several
    --dtype, --weight-dtype or --kv-dtype, every combination is measured and compared with the first one: the difference
    of the mean loss, and how many tokens would be chosen differently.

    A CKPT that is an adapter is measured on its base.
    """
    from ..checkpoint import Checkpoint
    from ..text.tokenizer import Tokenizer
    from ..text.tokenizer_files import TOKENIZER_FILE
    from .eval_data import read_texts
    from .eval_report import EvalReport

    model = adapted_model(checkpoint, base, adapter)
    opened = Checkpoint.open(model.path)
    length = _context(opened, context)
    if stride is not None and stride > length:
        raise ConfigError(f"--stride {stride} is more than the context of {length} tokens.")
    has_tokenizer = (opened.path / TOKENIZER_FILE).exists()
    texts = read_texts(data, Tokenizer.from_folder(opened.path) if has_tokenizer else None, limit, ignored)
    given = {name: value for name, value in engine_values.items() if value is not None}
    names = ("dtype", "weight_dtype", "kv_dtype")
    runs = [
        _measure(model, texts, (length, stride or length), dict(zip(names, chosen, strict=True)) | given)
        for chosen in product(*(values or ("auto",) for values in (dtypes, weight_dtypes, kv_dtypes)))
    ]
    report = EvalReport(str(data), length, stride or length, tuple(runs))
    if as_json:
        print_json(report.document())
    else:
        click.echo(report.text())


def _context(checkpoint: "Checkpoint", wanted: int | None) -> int:
    from ..model.stored_config import stored_config

    longest = stored_config(checkpoint).context_length
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"--context {wanted} is more than the {longest} positions that {checkpoint.path} has. Lower it to "
            f"{longest}."
        )
    return min(longest, LONGEST_DEFAULT) if wanted is None else wanted


def _measure(
    model: AdaptedModel, texts: "list[EvalText]", window: tuple[int, int], engine_values: dict[str, Any]
) -> "EvalRun":
    from ..infer.engine.llm import LLM
    from ..infer.engine.perplexity import measure_perplexity, num_scored
    from .eval_report import EvalRun

    context, stride = window
    values = {"max_model_len": context, "max_running": MAX_RUNNING, **model.options, **engine_values}
    with LLM(model.path, **values) as llm:
        info = llm.model_info()
        name = f"{info.dtype}, weights {info.weight_dtype}, KV cache {info.kv_dtype}, tokens scored"
        with progress_bar(name, num_scored(texts), show="{:,}".format) as bar:
            return EvalRun(info, measure_perplexity(llm, texts, context, stride, bar.advance, model.request_adapter))
