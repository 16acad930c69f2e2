"""tk: one toolkit from training to deployment.

The repository root is this package. Public names are loaded when first used, so that `import tk` stays instant and
the client, the checkpoint tools and `tk --help` never start a deep-learning stack.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .infer import LLM, Client, SamplingParams
    from .train import TrainConfig, Trainer

__version__ = "0.1.0"

__all__ = ["LLM", "Checkpoint", "Client", "SamplingParams", "TrainConfig", "Trainer", "__version__"]

_HOMES = MappingProxyType(
    {
        "Checkpoint": ".checkpoint",
        "Client": ".infer",
        "LLM": ".infer",
        "SamplingParams": ".infer",
        "TrainConfig": ".train",
        "Trainer": ".train",
    }
)


def __getattr__(name: str) -> Any:
    """Import the room that owns a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
