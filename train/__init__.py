"""Training: TP x DP with ZeRO, one engine. Importing this package imports no torch until a name is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import TrainConfig
    from .trainer import Trainer

__all__ = ["TrainConfig", "Trainer"]


def __getattr__(name: str) -> Any:
    if name == "TrainConfig":
        from .config import TrainConfig

        return TrainConfig
    if name == "Trainer":
        from .trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
