"""The inputs that a configuration names: all that are absent are listed, and folders to be made are not files."""

from pathlib import Path

import pytest

from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.tests.train.conftest import Configure
from tk.train.config.initial_model import resolve
from tk.train.config.run_inputs import absent, check_folders, read_inputs
from tk.train.config.train_config import TrainConfig


def test_every_absent_input_is_listed(configure: Configure, corpus: Path, tmp_path: Path) -> None:
    sources = [{"path": str(corpus / "tokens")}, {"path": str(tmp_path / "a")}, {"path": str(tmp_path / "b")}]
    config = parse(configure(data={"sources": sources, "tokenizer": str(tmp_path / "c")}), TrainConfig, "test")
    errors = absent(config, resolve(config, "auto"))
    assert [str(error).partition(" does not exist")[0].rpartition("/")[2] for error in errors] == ["a", "b", "c"]
    present = parse(configure(), TrainConfig, "test")
    assert absent(present, resolve(present, "auto")) == []


def test_inputs_are_read_without_ranks(configure: Configure) -> None:
    config = parse(configure(), TrainConfig, "test")
    inputs = read_inputs(config, resolve(config, "auto"))
    assert inputs.model.vocab_size == 301
    assert inputs.train.num_rows > inputs.held_out.num_rows > 0
    assert {"config.json", "tokenizer.json"} <= inputs.side_files.keys()


def test_a_folder_that_is_a_file_is_refused_by_its_key(configure: Configure, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for name in (file, file / "deep" / "run"):
        with pytest.raises(ConfigError, match=r"\[checkpoint\] dir = .*file is a file, and must be a folder"):
            check_folders(parse(configure(checkpoint={"dir": str(name)}), TrainConfig, "test"))
    check_folders(parse(configure(checkpoint={"dir": str(tmp_path / "new" / "run")}), TrainConfig, "test"))
