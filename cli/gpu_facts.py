"""Facts about this machine's GPUs that `tk doctor` reports: what they can do, and the kernels that tk takes there."""

from collections.abc import Iterator

from ..core.cuda import read_gpus
from ..core.gpu_attention import attention_by_rows
from ..train.planning.gpu_plan import describe_gpu
from .gpu_option import installed_torch
from .machine import Fact

_HEAD_DIM = 128  # of most models


def gpu_facts() -> Iterator[Fact]:
    """Yields the facts about each kind of GPU."""
    release, gpus = installed_torch(), read_gpus()
    for gpu in dict.fromkeys(gpus):
        yield Fact("machine", "GPU features", describe_gpu(gpu))
        for dtype in ("bf16", "fp16", "fp32"):
            choices = attention_by_rows(gpu.capability, dtype, _HEAD_DIM, release)
            kernels = [f"{name} by {choice.kernel}" for name, choice in choices if choice.kernel != "refuse"]
            value = ", ".join(kernels) or "none: this GPU has no such products"
            yield Fact("tk uses", f"attention, {dtype}", value)
    if gpus:
        yield Fact("tk uses", "fp32 products", "in fp32; [precision] tf32 = true allows TF32 in training")
