"""The options of commands that start an engine. A default of None leaves the choice to EngineOptions."""

from typing import Final

import click

from ..core.dtypes import COMPUTE_NAMES
from ..infer.engine.kv_formats import KV_DTYPES
from ..infer.engine.options import KERNELS, WEIGHT_DTYPES
from .common import PATH, ByteSize

DTYPES: Final = click.Choice(["auto", *COMPUTE_NAMES])
QUANTIZED_DTYPES: Final = click.Choice(["auto", *WEIGHT_DTYPES])
KV_CACHE_DTYPES: Final = click.Choice(["auto", *KV_DTYPES])

tp_option = click.option("--tp", metavar="N", type=click.IntRange(1), help="Tensor-parallel ranks; default: 1.")
threads_option = click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(1),
    help="Threads of each rank; default: the cores divided by the ranks.",
)
dtype_option = click.option("--dtype", type=DTYPES, help="Dtype of the computation; default: auto, as stored.")
weight_dtype_option = click.option(
    "--weight-dtype", type=QUANTIZED_DTYPES, help="Quantize weights at load; default: auto, as in the computation."
)
kv_dtype_option = click.option(
    "--kv-dtype", type=KV_CACHE_DTYPES, help="Dtype of the KV cache; default: auto, that of the computation."
)
kernels_option = click.option(
    "--kernels", type=click.Choice(KERNELS), help="The kernels that compute; default: auto, the best on this machine."
)
batch_invariant_option = click.option(
    "--batch-invariant",
    is_flag=True,
    default=None,
    help="Logits have the same bits in any batch and at any cut of a prompt, or the start is refused.",
)
numa_option = click.option(
    "--numa", is_flag=True, default=None, help="Keep each rank's threads and memory on a NUMA node of its own."
)
packed_option = click.option(
    "--packed",
    metavar="FOLDER",
    type=PATH,
    help="Folder for packed weights, which later starts and other servers of CKPT on this machine map. Default: none.",
)
kv_memory_option = click.option(
    "--kv-memory", type=ByteSize(), help="Size of the KV cache per rank, for example 512MiB."
)
speculate_option = click.option(
    "--speculate",
    metavar="N",
    type=click.IntRange(0),
    help="Most proposals per step for a sequence's next tokens, of --draft or from its own text; default: 0.",
)
draft_option = click.option(
    "--draft",
    metavar="CKPT",
    type=PATH,
    help="Smaller model with the same tokenizer, which makes the proposals of --speculate. Default: none.",
)
draft_weight_dtype_option = click.option(
    "--draft-weight-dtype",
    type=QUANTIZED_DTYPES,
    help="Quantize the draft's weights at load; default: auto, as in the computation.",
)
max_model_len_option = click.option(
    "--max-model-len", metavar="N", type=click.IntRange(1), help="Most tokens of a request, prompt and output together."
)
