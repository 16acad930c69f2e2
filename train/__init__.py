"""Training: TP x PP x DP with ZeRO, one engine. Importing this package imports no torch until a name is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import TrainConfig
    from .model_engine import initialize
    from .trainer import Trainer

__all__ = ["TrainConfig", "Trainer", "initialize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"TrainConfig": "config", "Trainer": "trainer", "initialize": "model_engine"}[name]
    return getattr(import_module(f".{module}", __name__), name)
