"""The inputs of a run: its data, its tokenizer, and the shape of its model, which the tokenizer completes."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.errors import ConfigError
from ...data.dataset import PackedDataset
from ...data.documents import SPLITS
from ...data.stdlib import prepare_stdlib
from ...model.config import ModelConfig
from ...parallel.collectives import all_reduce
from ...parallel.mesh import Mesh
from ...text.tokenizer import Tokenizer
from ...text.tokenizer_files import SIDE_FILES
from ..config.initial_model import GivenModel
from ..config.train_config import TrainConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """A run's inputs.

    Attributes:
        model: the shape of the run's model.
        train, held_out: the rows of the two splits.
        fingerprint: a digest of everything that decides the order of tokens.
        side_files: the files beside the tensors of every checkpoint: config.json and the tokenizer's files.
    """

    model: ModelConfig
    train: PackedDataset
    held_out: PackedDataset
    fingerprint: str
    side_files: Mapping[str, bytes]


def open_inputs(config: TrainConfig, given: GivenModel, mesh: Mesh, device: torch.device) -> Inputs:
    """Opens data and tokenizer; every rank calls it. Rank 0 first prepares the standard library if it is the source.

    Raises:
        ConfigError: data or tokenizer are missing, damaged or do not fit each other or the model.
    """
    options = config.data
    if options.sources == "stdlib":
        tokenizer_folder, sources = _stdlib(config, mesh, device)
    else:
        sources = [(Path(source.path), source.weight) for source in options.sources]
        tokenizer_folder = sources[0][0]
    tokenizer = Tokenizer.from_folder(_tokenizer_folder(given, tokenizer_folder))
    seq_len, seed = config.train.seq_len, config.train.seed
    train, held_out = (
        PackedDataset(sources, seq_len, seed, split, options.eval_fraction, options.packing, tokenizer)
        for split in SPLITS
    )
    _check_tokenizer(train, tokenizer)
    model = _complete(config, given, tokenizer)
    if mesh.world.rank == 0:
        for note in (*train.notes(), *held_out.notes()):
            _log.info("%s", note)
    return Inputs(model, train, held_out, train.fingerprint, _side_files(model, tokenizer))


def _tokenizer_folder(given: GivenModel, source: Path) -> Path:
    if given.tokenizer is None and not source.is_dir():
        raise ConfigError(
            f"[data] sources: {source} does not say which tokenizer it was made with: give [data] tokenizer."
        )
    return given.tokenizer or source


def _stdlib(config: TrainConfig, mesh: Mesh, device: torch.device) -> tuple[Path, list[tuple[Path, float]]]:
    cache, vocab_size = Path(config.data.cache), config.data.vocab_size
    if mesh.world.rank == 0:
        announced: set[str] = set()

        def announce(phase: str, done: int, total: int) -> None:
            if phase not in announced:
                _log.info("preparing Python's own library as data, once: %s", phase)
                announced.add(phase)

        prepare_stdlib(cache, vocab_size, announce)
    all_reduce(torch.zeros((), device=device), mesh.world)  # the other ranks wait for rank 0
    prepared = prepare_stdlib(cache, vocab_size)
    return prepared.tokenizer, [(prepared.tokens, 1.0)]


def _check_tokenizer(dataset: PackedDataset, tokenizer: Tokenizer) -> None:
    for source in dataset.sources:
        if source.tokens.tokenizer_sha256 != tokenizer.sha256:
            raise ConfigError(
                f"{source.tokens.path} was not made with the tokenizer in {tokenizer.folder}: prepare it again with "
                "that one (tk data prepare), or name the right [data] tokenizer."
            )


def _complete(config: TrainConfig, given: GivenModel, tokenizer: Tokenizer) -> ModelConfig:
    model = given.complete(tokenizer.vocab_size, tokenizer.eos_token_ids, config.precision.params)
    if model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"The tokenizer in {tokenizer.folder} has {tokenizer.vocab_size} tokens, more than "
            + (
                f"the vocabulary of {model.vocab_size} of [model] init = {config.model.init}: use that model's own "
                "tokenizer."
                if config.model.init
                else f"[model] vocab_size = {model.vocab_size}; leave that key out."
            )
        )
    return model


def _side_files(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    files = {"config.json": json.dumps(model.to_json(), indent=2).encode()}
    for name in SIDE_FILES:
        path = tokenizer.folder / name
        if path.exists():
            files[name] = path.read_bytes()
    return files
