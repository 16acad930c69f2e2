"""tk: one toolkit from training to deployment.

The repository root is this package. Public names are loaded when first used, so that `import tk` stays instant and
the client, the checkpoint tools and `tk --help` never start a deep-learning stack.
"""

from typing import TYPE_CHECKING

from .core.public_names import public_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .checkpoint import Checkpoint as Checkpoint
    from .infer import LLM as LLM
    from .infer import Client as Client
    from .infer import SamplingParams as SamplingParams
    from .train import TrainConfig as TrainConfig
    from .train import Trainer as Trainer
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        {
            "Checkpoint": ".checkpoint",
            "Client": ".infer",
            "LLM": ".infer",
            "SamplingParams": ".infer",
            "TrainConfig": ".train",
            "Trainer": ".train",
        },
    )
