"""Training: TP x PP x DP with ZeRO, one engine. Importing this package imports no torch until a name is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.train_config import TrainConfig
    from .foreign.model_engine import initialize
    from .run.trainer import Trainer

__all__ = ["TrainConfig", "Trainer", "initialize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"TrainConfig": ".config.train_config", "Trainer": ".run.trainer", "initialize": ".foreign.model_engine"}
    return getattr(import_module(homes[name], __name__), name)
