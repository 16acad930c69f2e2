"""An adapter's own tokenizer and templates: used if the vocabulary is the base's, and refused by name otherwise."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tk.checkpoint import Checkpoint
from tk.checkpoint.convert.side_files import plan_side_files
from tk.core.errors import CheckpointError
from tk.model.adapter_text import check_served_text, check_vocabulary, merged_text_files
from tk.tests.checkpoint.read.test_peft_folder import TENSORS, peft_folder

BPE = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
UNIGRAM = {"model": {"type": "Unigram", "vocab": [["a", 0.1], ["b", 0.2]]}, "added_tokens": BPE["added_tokens"]}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(dict(TENSORS), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(json.dumps(BPE))
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return peft_folder(tmp_path / "adapter")


def check(adapter: Path, base: Path) -> None:
    check_vocabulary(Checkpoint.open(adapter), Checkpoint.open(base))


def test_the_same_vocabulary_is_allowed_and_another_refused(adapter: Path, base: Path) -> None:
    check(adapter, base)
    for same in (BPE, UNIGRAM):
        (adapter / "tokenizer.json").write_text(json.dumps(same))
        check(adapter, base)
    for other in (
        BPE | {"added_tokens": [*BPE["added_tokens"], {"id": 3, "content": "<tool>"}]},
        BPE | {"added_tokens": []},
        {"model": {"vocab": {"a": 1, "b": 0}}, "added_tokens": BPE["added_tokens"]},
    ):
        (adapter / "tokenizer.json").write_text(json.dumps(other))
        with pytest.raises(
            CheckpointError, match=r"adapter/tokenizer.json has another vocabulary than .*base/tokenizer"
        ):
            check(adapter, base)
    (adapter / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json is damaged, or of an unknown kind"):
        check(adapter, base)
    (base / "tokenizer.json").unlink()
    check(adapter, base)


def test_added_tokens_alone_are_compared_too(adapter: Path, base: Path) -> None:
    (adapter / "added_tokens.json").write_text('{"<end>": 2}')
    check(adapter, base)
    (adapter / "added_tokens.json").write_text('{"<end>": 2, "<tool>": 3}')
    with pytest.raises(CheckpointError, match=r"added_tokens.json has another vocabulary .*\('<tool>', 3\) is in one"):
        check(adapter, base)


def test_its_files_take_the_place_of_the_bases(adapter: Path, base: Path) -> None:
    def merged() -> dict[str, str]:
        files = merged_text_files(Checkpoint.open(adapter), plan_side_files(Checkpoint.open(base)))
        return {file.name: Path(str(file.content)).parent.name for file in files}

    for name in ("config.json", "chat_template.jinja", "tokenizer_config.json"):
        (base / name).write_text("{}")
    every = dict.fromkeys(("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"), "base")
    (adapter / "README.md").write_text("a card")
    (adapter / "config.json").write_text("{}")
    assert merged() == every
    (adapter / "chat_template.jinja").write_text("theirs")
    assert merged() == every | {"chat_template.jinja": "adapter"}
    (adapter / "chat_template.jinja").unlink()
    (adapter / "tokenizer_config.json").write_text("{}")
    (adapter / "tokenizer.json").write_text("{}")
    assert merged() == {"config.json": "base", "tokenizer.json": "adapter", "tokenizer_config.json": "adapter"}


def test_a_server_takes_adapters_with_the_template_of_the_base_or_none(adapter: Path, base: Path) -> None:
    def check_served() -> None:
        check_served_text(Checkpoint.open(adapter), Checkpoint.open(base))

    refused = pytest.raises(
        CheckpointError, match=r"adapter has a chat template of its own, .* that of the base, .*base"
    )
    check_served()
    template = "{{ bos_token }}{{ messages[0].content }}"
    (adapter / "chat_template.jinja").write_text(template)
    with refused:
        check_served()  # the base has none
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    check_served()  # the same one, at another place
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    check_served()  # tokens that it does not name
    (adapter / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    with refused:
        check_served()
    (adapter / "tokenizer_config.json").unlink()
    (adapter / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with refused:
        check_served()
    (adapter / "chat_template.jinja").unlink()
    (adapter / "added_tokens.json").write_text('{"<tool>": 3}')
    with pytest.raises(CheckpointError, match=r"added_tokens.json has another vocabulary"):
        check_served()
