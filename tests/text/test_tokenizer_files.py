"""The chat template among a tokenizer's files, wherever it is."""

from pathlib import Path

import pytest

from tk.core.errors import CheckpointError
from tk.text.tokenizer_files import CONFIG_FILE, TEMPLATE_FILE, TextFiles, eos_token_ids_of, has_chat_template


def test_a_chat_template_is_found_in_both_places(tmp_path: Path) -> None:
    assert not has_chat_template(TextFiles.read(tmp_path))
    (tmp_path / CONFIG_FILE).write_text('{"chat_template": null}')
    assert not has_chat_template(TextFiles.read(tmp_path))
    (tmp_path / CONFIG_FILE).write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(TextFiles.read(tmp_path))
    (tmp_path / CONFIG_FILE).unlink()
    (tmp_path / TEMPLATE_FILE).write_text("{{ messages }}")
    assert has_chat_template(TextFiles.read(tmp_path))


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=CONFIG_FILE):
        has_chat_template(TextFiles.read(tmp_path))


def test_files_are_held_as_they_were_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"eos_token": "a"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    files = TextFiles.read(tmp_path)
    (tmp_path / CONFIG_FILE).unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    (tmp_path / TEMPLATE_FILE).write_text("{{ messages }}")
    assert files.json(CONFIG_FILE) == {"eos_token": "a"}
    assert eos_token_ids_of(files) == {1, 2}
    assert not has_chat_template(files)
    assert set(files.without(CONFIG_FILE).contents) == {"generation_config.json"}


def test_what_cannot_be_read_or_understood_is_named(tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_FILE).write_bytes(b"\xff")
    files = TextFiles.read(tmp_path)
    with pytest.raises(CheckpointError, match=f"{TEMPLATE_FILE}: it is not UTF-8"):
        files.text(TEMPLATE_FILE)
    (tmp_path / CONFIG_FILE).mkdir()
    with pytest.raises(CheckpointError, match=f"Cannot read .*{CONFIG_FILE}: Is a directory"):
        TextFiles.read(tmp_path)
