"""Small files that a user names are read whole, or not at all."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.cli.generate import _text_of
from tk.core.config import read_toml
from tk.core.errors import ConfigError, ManifestError
from tk.core.given_files import read_given, read_given_text
from tk.infer.serve.access.tokens import read_text as read_tokens
from tk.model.config import ModelConfig
from tk.parity.layouts_file import _listed as read_layouts
from tk.train.config.deepspeed.config import read_deepspeed


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb\rc\n")
    assert read_given(tmp_path / "file", 7) == b"a\r\nb\rc\n"
    assert read_given_text(tmp_path / "file") == (tmp_path / "file").read_text() == "a\nb\nc\n"
    with pytest.raises(OSError, match="File too large") as end:
        read_given(tmp_path / "file", 6)
    assert end.value.errno == errno.EFBIG


READERS: dict[str, Callable[[Path], object]] = {
    "a configuration": read_toml,
    "a schema": _text_of,
    "tokens": read_tokens,
    "a configuration of DeepSpeed": read_deepspeed,
    "layouts": read_layouts,
}


@pytest.mark.parametrize("kind", READERS)
def test_a_file_without_an_end_is_an_error(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero.*File too large, more than 64 MiB"):
        READERS[kind](Path("/dev/zero"))


def test_a_models_config_without_an_end_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ManifestError, match="File too large"):
        ModelConfig.from_folder(tmp_path)
