"""The model of a planned run: its inputs are opened as ranks open them, or noted where they are on another machine."""

from pathlib import Path

from ...model.config import ModelConfig
from ...text.tokenizer import Tokenizer
from ..config.initial_model import GivenModel
from ..config.run_inputs import absent, check_folders, check_vocabulary, read_inputs, stdlib_of
from ..config.train_config import TrainConfig


def planned_model(config: TrainConfig, given: GivenModel, here: bool) -> tuple[ModelConfig, list[str]]:
    """Returns the shape of a run's model, and a sentence for each input that is not on this machine.

    Args:
        config: the configuration.
        given: the model that the configuration gives.
        here: whether the run is to start on this machine: an absent input is then an error.

    Raises:
        ConfigError: data are damaged, do not fit the tokenizer or the model, or are absent and `here` is True.
        CheckpointError: the tokenizer cannot be read, or is absent and `here` is True.
    """
    check_folders(config)
    missing = absent(config, given)
    if missing and here:
        raise missing[0]
    prepared_at_start = config.data.sources == "stdlib" and not stdlib_of(config).tokens.exists()
    if not missing and not prepared_at_start:
        return read_inputs(config, given).model, []
    folder = given.tokenizer or _own_tokenizer(config)
    size = Tokenizer.from_folder(folder).vocab_size if folder.is_dir() else config.data.vocab_size
    model = given.complete(size, (), config.precision.params)
    if folder.is_dir() or prepared_at_start:
        check_vocabulary(config, model, folder, size)
    return model, [f"{error} It was not checked." for error in missing]


def _own_tokenizer(config: TrainConfig) -> Path:
    """Returns the folder of the tokenizer that comes with the data, which may not exist."""
    sources = config.data.sources
    return stdlib_of(config).tokenizer if sources == "stdlib" else Path(sources[0].path)
