"""Config, tokenizer and other small files that a copy takes along."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tk.checkpoint import Checkpoint
from tk.checkpoint.files import disk_facts, storage
from tk.cli.main import main
from tk.core.errors import CheckpointError, DamagedCheckpoint


def _odd_name(folder: Path) -> None:
    (folder / "my notes.txt").write_text("")


def _dangling(folder: Path) -> None:
    (folder / "vocab.txt").symlink_to("nowhere")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "vocab.txt")


def _folder(folder: Path) -> None:
    (folder / "vocab.json").mkdir()


def _too_large(folder: Path) -> None:
    (folder / "vocab.txt").touch()
    os.truncate(folder / "vocab.txt", 2**29)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_odd_name, "'my notes.txt' is not a plain file name (letters, digits, dot, dash and underscore). Rename it"),
        (_dangling, "nowhere"),
        (_pipe, "not a regular file"),
        (_folder, "not a regular file"),
        (_too_large, "at most"),
    ],
)
def test_side_files_that_cannot_be_taken_along_are_refused_before_the_copy(
    llama_step: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    spoil(tmp_path / "hf")
    assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new"), "--dry-run"]) == 3
    assert message in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]


@pytest.mark.parametrize("name", ["README.md", "config.json", "model-00000.safetensors"])
def test_a_link_to_itself_is_named_with_a_remedy(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    (tmp_path / "hf" / name).unlink(missing_ok=True)
    (tmp_path / "hf" / name).symlink_to(name)
    assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / 'hf' / name} cannot be " in said
    assert "Too many levels of symbolic links (ELOOP). A link there leads back to itself: make it lead to" in said


def test_side_files_are_counted_streamed_and_checked(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    data = os.urandom(5 * 2**20)
    (tmp_path / "hf" / "vocab.txt").write_bytes(data)
    (tmp_path / "hf" / ".hidden.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(disk_facts, "free_bytes", lambda folder: 5 * 2**20)
        assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 1
    assert "5 MiB are free there" in " ".join(capsys.readouterr().err.split())
    pread, most = storage.pread, [0]

    def watched(fd: int, buffer: memoryview, offset: int, once: bool = False) -> int:
        most.append(len(buffer))
        return pread(fd, buffer, offset, once)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "pread", watched)
        assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    assert max(most) <= 2**20
    assert (tmp_path / "new" / "vocab.txt").read_bytes() == data
    assert not (tmp_path / "new" / ".hidden.json").exists()
    assert Checkpoint.open(tmp_path / "new").verify().ok
    (tmp_path / "new" / "vocab.txt").write_bytes(data[::-1])
    assert main(["reshard", str(tmp_path / "new"), str(tmp_path / "newer"), "--tp", "1"]) == 3
    assert "vocab.txt is not the file that was saved" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["hf", "new", "run"]


SMALL = {  # beside the weights of models on the hub: all of it is needed, or a duty
    "generation_config.json": "{}", "tokenizer_config.json": "{}", "qwen.tiktoken": "IQ== 0\n", "source.spm": "s",
    "target.vocab": "v", "tokenizer.model": "m", "merges.txt": "a b\n", "x.bpe": "b", "chat_template.jinja": "c",
    "additional_chat_templates/tool_use.jinja": "tools", "LICENSE": "all rights", "NOTICE.txt": "n", "README.md": "r",
    "LICENSE-MODEL.pdf": "p", "COPYING": "c", "modeling_own.py": "x = 1\n", "preprocessor_config.json": "{}",
}  # fmt: skip
LEFT = ("optimizer.pt", "training_args.bin", "weights.gguf", "flax_model.msgpack", "figure.png", "original/a.pth")
HIDDEN = (".gitattributes", ".git/config", ".env", ".netrc", "additional_chat_templates/._tool_use.jinja")


def fill(folder: Path, names: dict[str, str]) -> None:
    for name, text in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("command", ["export", "export --plain", "reshard --tp 2"])
def test_what_a_model_needs_is_copied_and_the_rest_named(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    fill(tmp_path / "hf", SMALL | dict.fromkeys((*LEFT, *HIDDEN), "secret"))
    capsys.readouterr()
    target = tmp_path / "new"
    assert main([*command.split()[:1], str(tmp_path / "hf"), str(target), *command.split()[1:]]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "note: not copied: figure.png, flax_model.msgpack, optimizer.pt, original, training_args.bin, weights" in said
    )
    assert {name: (target / name).read_text() for name in SMALL} == SMALL
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert not copied & {*LEFT, *HIDDEN}
    found = Checkpoint.open(target)
    assert found.verify().ok
    again = tmp_path / "again"  # from the copy, which may be sealed
    assert main(["export", str(target), str(again), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_copied"] == []
    assert {name: (again / name).read_text() for name in SMALL} == SMALL
    (again / "additional_chat_templates" / "notes.txt").write_text("mine")
    (again / "thesis.odt").write_text("mine")
    assert main(["reshard", str(again), str(tmp_path / "last"), "--tp", "1", "--dry-run"]) == 0
    assert "not copied: thesis.odt, additional_chat_templates/notes.txt" in capsys.readouterr().err
    assert main(["export", str(target), str(again), "--force"]) == 2
    assert "holds more than a checkpoint" in capsys.readouterr().err
    for name in ("additional_chat_templates/notes.txt", "thesis.odt"):
        (again / name).unlink()
    assert main(["export", str(target), str(again), "--force"]) == 0
    assert {name: (again / name).read_text() for name in SMALL} == SMALL


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", ["LICENSE", "vocab.txt"])
def test_a_link_to_a_file_of_another_name_is_not_carried_away(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], plain: bool, name: str
) -> None:
    """A link in a downloaded folder may lead to a key, which a copy would publish. Caches and farms are copied."""
    assert main(["export", str(llama_step), str(tmp_path / "first"), "--plain"]) == 0
    fill(tmp_path / "first", {name: "text", "NOTICE": "n", "COPYING": "c"})
    source, key = tmp_path / "source", tmp_path / "home" / "id_rsa"
    assert main(["export", str(tmp_path / "first"), str(source), *(["--plain"] if plain else [])]) == 0
    fill(tmp_path / "home", {"id_rsa": "text", "NOTICE": "n", "0123456789abcdef0123456789abcd": "c"})
    for linked, target in ((name, "id_rsa"), ("NOTICE", "NOTICE"), ("COPYING", "0123456789abcdef0123456789abcd")):
        (source / linked).unlink()
        (source / linked).symlink_to(key.with_name(target))
    (source / "README.md").symlink_to("config.json")
    capsys.readouterr()
    sealed = not plain and name == "vocab.txt"  # its digest shows that it is the file that was sealed
    assert main(["export", str(source), str(tmp_path / "new")]) == (0 if sealed else 3)
    said = " ".join(capsys.readouterr().err.split())
    assert sealed or f"{source / name} is a link to {key}, a file of another name" in said
    (source / name).unlink()
    (source / name).write_text("text")
    assert main(["export", str(source), str(tmp_path / "newer")]) == 0
    copied = {each: (tmp_path / "newer" / each).read_text() for each in (name, "NOTICE", "COPYING")}
    assert copied == {name: "text", "NOTICE": "n", "COPYING": "c"}


def test_documents_that_cannot_be_stored_are_left_behind_and_named(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A browser names a second download `LICENSE (1)`; nothing depends on a document."""
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    for name in ("LICENSE (1).txt", "läs mig.md"):
        (tmp_path / "hf" / name).write_text("text")
    (tmp_path / "hf" / "license").mkdir()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    assert "note: not copied: 'LICENSE (1).txt', license, 'läs mig.md'" in capsys.readouterr().err


def test_odd_names_are_left_behind_on_one_line(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among them the folder of templates, if it is none; the note is one line that any terminal shows."""
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    for name in (b"new\nline", b"caf\xe9.part", b"esc\x1b[31m", b"additional_chat_templates"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path / "hf"), name))).touch()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    said = r"note: not copied: additional_chat_templates, 'caf\udce9.part', 'esc\x1b[31m', 'new\nline'"
    assert said in capsys.readouterr().err.splitlines()


def test_a_copy_without_reading_takes_side_files_along(llama_step: Path, tmp_path: Path) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    fill(tmp_path / "hf", SMALL)
    assert main(["reshard", str(tmp_path / "hf"), str(tmp_path / "tk"), "--tp", "1"]) == 0
    assert main(["export", str(tmp_path / "tk"), str(tmp_path / "linked"), "--link"]) == 0
    assert {name: (tmp_path / "linked" / name).read_text() for name in SMALL} == SMALL
    assert Checkpoint.open(tmp_path / "linked").verify().ok


def test_documents_of_a_sealed_folder_may_be_edited_and_removed(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model card is written after an export; what decides tokens and weights stays sealed."""
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    fill(tmp_path / "hf", SMALL)
    assert main(["export", str(tmp_path / "hf"), str(tmp_path / "tk")]) == 0
    (tmp_path / "tk" / "README.md").write_text("# A model card")
    (tmp_path / "tk" / "LICENSE").unlink()
    assert main(["verify", str(tmp_path / "tk")]) == 0
    assert "README.md was edited after the checkpoint was sealed" in capsys.readouterr().err
    assert main(["reshard", str(tmp_path / "tk"), str(tmp_path / "new"), "--tp", "2"]) == 0
    assert (tmp_path / "new" / "README.md").read_text() == "# A model card"
    assert not (tmp_path / "new" / "LICENSE").exists()
    assert Checkpoint.open(tmp_path / "new").verify().notes == ()
    for name in ("modeling_own.py", "additional_chat_templates/tool_use.jinja"):
        (tmp_path / "new" / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name} is missing") as error:
            Checkpoint.open(tmp_path / "new")
        assert not isinstance(error.value, DamagedCheckpoint)


CODE = {
    "configuration_own.py": (
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    ),
    "modeling_own.py": (
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    ),
}


def test_remote_code_and_chat_templates_load_from_an_export(
    llama_step: Path, byte_level_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers loads a model by the code beside it, and a tokenizer with several templates, as from the source."""
    import transformers
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [str(tmp_path / "modules"), *sys.path])
    source = tmp_path / "hf"
    assert main(["export", str(llama_step), str(source), "--plain"]) == 0
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    }
    (source / "config.json").write_text(json.dumps(config))
    fill(source, CODE | {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((byte_level_folder / name).read_bytes())
    assert main(["export", str(source), str(tmp_path / "out")]) == 0
    one, two = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
        for folder in (source, tmp_path / "out")
    )
    assert type(two).__name__ == "OwnModel"
    assert all(torch.equal(one.state_dict()[name], values) for name, values in two.state_dict().items())
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}


def test_every_dtype_in_a_config_changes_with_the_weights(llama_step: Path, tmp_path: Path) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    part = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "hidden_size": 3}
    more = {
        "torch_dtype": "bfloat16", "text_config": part, "vision_config": {"inner_config": part, "torch_dtype": None},
        "quantization_config": {"dtype": "int8"}, "note": {"dtype": "mine"}, "model_type": "not-ours",
    }  # fmt: skip
    path.write_text(json.dumps(config | more))
    assert main(["reshard", str(tmp_path / "hf"), str(tmp_path / "wide"), "--tp", "1", "--dtype", "fp32"]) == 0
    found = Checkpoint.open(tmp_path / "wide").config()
    wide = {"dtype": "float32", "torch_dtype": "float32", "hidden_size": 3}
    assert (found["dtype"], found["torch_dtype"], found["text_config"]) == ("float32", "float32", wide)
    assert found["vision_config"] == {"inner_config": wide, "torch_dtype": "float32"}
    assert (found["quantization_config"], found["note"]) == ({"dtype": "int8"}, {"dtype": "mine"})
    for without in ("dtype", "torch_dtype"):
        del config["dtype"]
        path.write_text(json.dumps(config | ({without: "bfloat16"} if without == "torch_dtype" else {})))
        config["dtype"] = "bfloat16"
        target = tmp_path / f"of {without}"
        assert main(["reshard", str(tmp_path / "hf"), str(target), "--tp", "1", "--dtype", "fp32"]) == 0
        found = Checkpoint.open(target).config()
        assert {key: found[key] for key in ("dtype", "torch_dtype") if key in found} == {without: "float32"}
