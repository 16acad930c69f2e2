"""The inputs of a run, opened by all of its ranks; Python's library is prepared as data first, if it is the source."""

import logging
from pathlib import Path

import torch

from ...data.stdlib import prepare_stdlib
from ...parallel.collectives import all_reduce
from ...parallel.mesh import Mesh
from ..config.initial_model import GivenModel
from ..config.run_inputs import Inputs, read_inputs
from ..config.train_config import TrainConfig

_log = logging.getLogger(__name__)


def open_inputs(config: TrainConfig, given: GivenModel, mesh: Mesh, device: torch.device) -> Inputs:
    """Opens data and tokenizer; every rank calls it. Rank 0 first prepares the standard library if it is the source.

    Raises:
        ConfigError, CheckpointError: see `read_inputs`.
    """
    if config.data.sources == "stdlib":
        _prepare(config, mesh, device)
    inputs = read_inputs(config, given)
    if mesh.world.rank == 0:
        for note in (*inputs.train.notes(), *inputs.held_out.notes()):
            _log.info("%s", note)
        rows = inputs.train.num_rows, inputs.held_out.num_rows
        _log.debug("%d rows of %d tokens to train on, %d held out", rows[0], config.train.seq_len, rows[1])
    return inputs


def _prepare(config: TrainConfig, mesh: Mesh, device: torch.device) -> None:
    cache, vocab_size = Path(config.data.cache), config.data.vocab_size
    if mesh.world.rank == 0:
        announced: set[str] = set()

        def announce(phase: str, done: int, total: int) -> None:
            if phase not in announced:
                _log.info("preparing Python's own library as data, once: %s", phase)
                announced.add(phase)

        prepare_stdlib(cache, vocab_size, announce)
    all_reduce(torch.zeros((), device=device), mesh.world)  # the other ranks wait for rank 0
    prepare_stdlib(cache, vocab_size)  # verifies it on every rank
