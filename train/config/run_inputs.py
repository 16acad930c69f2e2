"""The inputs of a run as its configuration names them: data, tokenizer, and the shape of its model (no torch).

Ranks open them, and `tk plan` and `tk train` before ranks start, so that both refuse the same with the same words.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ConfigError, TkError
from ...data.dataset import PackedDataset
from ...data.documents import SPLITS
from ...data.megatron_file import is_megatron
from ...data.stdlib import PreparedStdlib, prepared_stdlib
from ...data.token_file import TokenMeta
from ...model.config import ModelConfig
from ...text.tokenizer import Tokenizer
from ...text.tokenizer_files import SIDE_FILES
from .initial_model import GivenModel
from .train_config import TrainConfig

_SOURCES: Final = (
    "It must be a token folder, which `tk data prepare` makes, or the prefix of Megatron-LM's files {0}.bin and "
    "{0}.idx."
)


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


def read_inputs(config: TrainConfig, given: GivenModel) -> Inputs:
    """Opens data and tokenizer, which exist; the standard library is prepared already if it is the source.

    Raises:
        ConfigError: data are missing, damaged or do not fit the tokenizer or the model.
        CheckpointError: the tokenizer cannot be read.
    """
    options = config.data
    if options.sources == "stdlib":
        prepared = stdlib_of(config)
        sources, own_tokenizer = [(prepared.tokens, 1.0)], prepared.tokenizer
    else:
        sources = [(Path(source.path), source.weight) for source in options.sources]
        own_tokenizer = sources[0][0]
        _check_sources([path for path, _ in sources])
    tokenizer = Tokenizer.from_folder(_tokenizer_folder(given, own_tokenizer))
    seq_len, seed = config.train.seq_len, config.train.seed
    train, held_out = (
        PackedDataset(sources, seq_len, seed, split, options.eval_fraction, options.packing, tokenizer)
        for split in SPLITS
    )
    _check_tokenizer(train, tokenizer)
    model = given.complete(tokenizer.vocab_size, tokenizer.eos_token_ids, config.precision.params)
    check_vocabulary(config, model, tokenizer.folder, tokenizer.vocab_size)
    return Inputs(model, train, held_out, train.fingerprint, _side_files(model, tokenizer))


def stdlib_of(config: TrainConfig) -> PreparedStdlib:
    """Returns the folders of the standard library as data, whether they exist or not."""
    return prepared_stdlib(Path(config.data.cache), config.data.vocab_size)


def absent(config: TrainConfig, given: GivenModel) -> Sequence[TkError]:
    """Returns an error for each input that does not exist on this machine; data that a run prepares are no input."""
    return list(_absent(config, given))


def _absent(config: TrainConfig, given: GivenModel) -> Iterator[TkError]:
    for source in () if config.data.sources == "stdlib" else config.data.sources:
        if not Path(source.path).exists() and not is_megatron(Path(source.path)):
            yield ConfigError(f"[data] sources: {source.path} does not exist. {_SOURCES.format(source.path)}")
    if given.tokenizer is not None and not given.tokenizer.exists():
        yield CheckpointError(
            f"[data] tokenizer: {given.tokenizer} does not exist: it must be a folder with tokenizer.json."
        )


def check_folders(config: TrainConfig) -> None:
    """Raises ConfigError if a folder that the run makes has a name that a file takes, or lies below a file."""
    cache = {"[data] cache": Path(config.data.cache)} if config.data.sources == "stdlib" else {}
    states = {"[offload] folder": Path(config.offload.folder)} if config.offload.folder else {}
    for key, folder in {"[checkpoint] dir": config.run_folder, **cache, **states}.items():
        taken = next((path for path in (folder, *folder.parents) if path.exists()), None)
        if taken is not None and not taken.is_dir():
            raise ConfigError(f"{key} = {str(folder)!r}: {taken} is a file, and must be a folder. Name another folder.")


def check_vocabulary(config: TrainConfig, model: ModelConfig, tokenizer: Path, vocab_size: int) -> None:
    """Raises ConfigError if a tokenizer has more tokens than the model."""
    if model.vocab_size < vocab_size:
        raise ConfigError(
            f"The tokenizer in {tokenizer} has {vocab_size} tokens, more than "
            + (
                f"the vocabulary of {model.vocab_size} of [model] init = {config.model.init}: use that model's own "
                "tokenizer."
                if config.model.init
                else f"[model] vocab_size = {model.vocab_size}; leave that key out."
            )
        )


def _check_sources(paths: Sequence[Path]) -> None:
    """Raises ConfigError if a path is no source; otherwise only its tokenizer would seem to be missing."""
    for path in paths:
        if path.is_dir():
            TokenMeta.read(path / "meta.json")
        elif not is_megatron(path):
            raise ConfigError(f"[data] sources: {path} is a file. {_SOURCES.format(path)}")


def _tokenizer_folder(given: GivenModel, source: Path) -> Path:
    if given.tokenizer is None and not source.is_dir():
        raise ConfigError(
            f"[data] sources: {source} does not say which tokenizer it was made with: give [data] tokenizer."
        )
    return given.tokenizer or source


def _check_tokenizer(dataset: PackedDataset, tokenizer: Tokenizer) -> None:
    for source in dataset.sources:
        if source.tokens.tokenizer_sha256 != tokenizer.sha256:
            raise ConfigError(
                f"{source.tokens.path} was not made with the tokenizer in {tokenizer.folder}: prepare it again with "
                "that one (tk data prepare), or name the right [data] tokenizer."
            )


def _side_files(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    files = {"config.json": json.dumps(model.to_json(), indent=2).encode()}
    for name in SIDE_FILES:
        path = tokenizer.folder / name
        if path.exists():
            files[name] = path.read_bytes()
    return files
