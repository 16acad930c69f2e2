"""Training: TP x PP x DP with ZeRO, one engine. Importing this package imports no torch until a name is used."""

from typing import TYPE_CHECKING

from ..core.public_names import public_names

if TYPE_CHECKING:
    from .config.train_config import TrainConfig as TrainConfig
    from .foreign.model_engine import initialize as initialize
    from .foreign.on_meta import on_meta as on_meta
    from .run.trainer import Trainer as Trainer
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        {
            "TrainConfig": ".config.train_config",
            "Trainer": ".run.trainer",
            "initialize": ".foreign.model_engine",
            "on_meta": ".foreign.on_meta",
        },
    )
