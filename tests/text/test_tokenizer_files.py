"""The chat template among a tokenizer's files, wherever it is."""

from pathlib import Path

import pytest

from tk.core.errors import CheckpointError
from tk.text.tokenizer_files import CONFIG_FILE, TEMPLATE_FILE, has_chat_template


def test_a_chat_template_is_found_in_both_places(tmp_path: Path) -> None:
    assert not has_chat_template(tmp_path)
    (tmp_path / CONFIG_FILE).write_text('{"chat_template": null}')
    assert not has_chat_template(tmp_path)
    (tmp_path / CONFIG_FILE).write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(tmp_path)
    (tmp_path / CONFIG_FILE).unlink()
    (tmp_path / TEMPLATE_FILE).write_text("{{ messages }}")
    assert has_chat_template(tmp_path)


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=CONFIG_FILE):
        has_chat_template(tmp_path)
