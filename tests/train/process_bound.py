"""Makes an object of the training API and prints what becomes of it in other processes: NAME, and a folder for a save.

python -m tk.tests.train.process_bound ModelEngine FOLDER
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tk.core.config import parse
from tk.tests.other_processes import print_outcomes
from tk.train import TrainConfig, Trainer, initialize
from tk.train.foreign.model_engine import ModelEngine


def use_step(engine: ModelEngine) -> None:
    """Makes an optimizer step."""
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert engine.step()


def use_save(engine: ModelEngine, folder: str) -> None:
    """Starts a save of the present step, if it has none yet, which is still under way."""
    use_step(engine)
    engine.save(Path(folder) / "run")


def use_trainer(trainer: Trainer) -> None:
    """Makes a step of training."""
    trainer.step()


def close(subject: ModelEngine | Trainer) -> None:
    """Closes a ModelEngine; a Trainer needs no end."""
    if isinstance(subject, ModelEngine):
        subject.close()


def make_trainer(folder: str) -> Trainer:
    """Returns a trainer of a tiny model on the files of Python's library."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    data = {
        "model": sizes,
        "train": {"steps": 99, "global_batch_size": 1, "micro_batch_size": 1, "seq_len": 16},
        "checkpoint": {"dir": folder},
    }
    return Trainer(parse(data, TrainConfig, "test"))


def main(name: str, folder: str) -> None:
    uses: dict[str, Callable[..., None]] = {"step": use_step, "save": partial(use_save, folder=folder)}
    subject = make_trainer(folder) if name == "Trainer" else initialize(nn.Linear(4, 4))
    use = use_trainer if name == "Trainer" else uses[name]
    use(subject)  # type: ignore[arg-type]
    print_outcomes(subject, use, close)


if __name__ == "__main__":
    main(*sys.argv[1:])
