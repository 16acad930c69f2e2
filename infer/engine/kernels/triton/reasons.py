"""The reasons why Triton's kernels cannot compute, as far as they are known without torch."""

import importlib.metadata
from importlib.util import find_spec
from typing import Final

from .....core.cuda import count_gpus, read_gpus
from .rows.interpreted import is_interpreted

OLDEST: Final = (3, 6)  # release of Triton: older ones take no named tuples as arguments
OLDEST_CARD: Final = (8, 0)  # compute capability: older ones have no bf16


def triton_version() -> str:
    """Returns the release of Triton that this Python imports; "" without one."""
    if find_spec("triton") is None:
        return ""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def why_not_here() -> str:
    """Returns the reason why this Python cannot run Triton's kernels; "" if it can."""
    version = triton_version()
    if not version:
        return "Triton is not installed, which comes with torch for CUDA on Linux"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == len(OLDEST) and numbers < OLDEST:
        return f"Triton {version} is older than {_dotted(OLDEST)}"
    return ""


def why_not_on(num_gpus: int) -> str:
    """Returns the reason why Triton's kernels cannot compute on so many GPUs of this machine; "" if they can."""
    reason = why_not_here()
    if reason or is_interpreted():
        return reason
    if count_gpus() < num_gpus:
        return f"this machine has {count_gpus()} GPUs for {num_gpus} ranks"
    for gpu in read_gpus()[:num_gpus]:
        if gpu.capability < OLDEST_CARD:
            return f"{gpu.name} has compute capability {_dotted(gpu.capability)}, less than {_dotted(OLDEST_CARD)}"
    return ""


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
