"""Paths that hold no checkpoint of tk: the message names the format, and a remedy."""

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from tk.checkpoint import Checkpoint
from tk.cli.main import main
from tk.core.errors import CheckpointError

# What a folder holds ("/" at the end: a folder), what it is called, and what is to be done.
FOLDERS = {
    "": ("holds no checkpoint: the folder is empty", "Hugging Face folder"),
    "pytorch_model.bin config.json tokenizer.json": ("PyTorch pickles (pytorch_model.bin)", "save_pretrained"),
    "pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json": ("PyTorch pickles", "save_pretrained"),
    "consolidated.00.pth params.json": ("PyTorch pickles", "save_pretrained"),
    "__0_0.distcp .metadata": ("distributed checkpoint of PyTorch (DCP", "dcp_to_torch_save"),
    "shard-00001-model-00001-of-00001.safetensors": ("(DCP", "save_pretrained"),
    "global_step500/ latest zero_to_fp32.py": ("DeepSpeed checkpoint (global_step500)", "zero_to_fp32.py"),
    "mp_rank_00_model_states.pt": ("DeepSpeed checkpoint", "safetensors"),
    "iter_0000100/ latest_checkpointed_iteration.txt": ("Megatron-LM checkpoint (iter_0000100)", "Hugging Face"),
    "mp_rank_00/ mp_rank_01/": ("Megatron-LM", "Hugging Face"),
    "llama.Q4_K_M.gguf config.json": ("GGUF", "gguf_file=llama.Q4_K_M.gguf"),
    "adapter_config.json adapter_model.bin tokenizer.json": ("pickle (adapter_model.bin)", "peft and call save_pre"),
    "adapter_config.json README.md": ("one part of an adapter (PEFT, adapter_config.json)", "download"),
    "adapter_model.safetensors": ("one part of an adapter (PEFT, adapter_model.safetensors)", "adapter_config.json"),
    "checkpoint-500/ trainer_state.json": ("transformers Trainer", "/checkpoint-500"),
    "blobs/ refs/ snapshots/": ("hub's cache", "/snapshots/REVISION"),
    "model.fp16.safetensors config.json": ("variant of the weights (model.fp16.safetensors)", "save_pretrained"),
    "consolidated.safetensors params.json": ("holds consolidated.safetensors", "rename it"),
    "flax_model.msgpack config.json": ("JAX (flax or orbax", "safetensors"),
    "_CHECKPOINT_METADATA manifest.ocdbt d/": ("JAX (flax or orbax", "safetensors"),
    "tf_model.h5 config.json": ("TensorFlow or Keras", "safetensors"),
    "saved_model.pb variables/": ("TensorFlow or Keras", "safetensors"),
    "model.onnx config.json": ("ONNX graph (model.onnx)", "exported from"),
    "weights.npz config.json": ("numpy or MLX (weights.npz)", "safetensors"),
    "tokenizer.json tokenizer_config.json": ("tokenizer and no weights", ""),
    "config.json generation_config.json": ("config.json and no weights", "download"),
    "LOCK metrics.jsonl": ("saved no step yet", ""),
    "LOCK step-00000001.tmp-0123abcd/": ("never finished", "step-00000001.tmp-0123abcd"),
    "notes.md src/": ("no checkpoint", "manifest.json"),
}
FILES = {
    "model.safetensors": ("one safetensors file", "name its folder"),
    "pytorch_model.bin": ("PyTorch pickle", "save_pretrained"),
    "model.gguf": ("GGUF", "save_pretrained"),
    "model.onnx": ("ONNX graph", "exported from"),
    "model.h5": ("Keras", "safetensors"),
    "model.msgpack": ("flax", "safetensors"),
    "manifest.json": ("file inside a checkpoint", "name its folder"),
    "model.tar.gz": ("archive", "unpack it"),
    "thesis.txt": ("is a file", "Hugging Face folder"),
}
ADDRESSES = {
    "s3://bucket/run": ("s3://bucket/run is an address (s3)", "Download it"),
    "gs://bucket/run/step-00000001": ("an address (gs)", "mount it"),
    "hf://org/name": ("an address (hf)", "hf download"),
    "https://huggingface.co/org/name": ("an address (https)", "hf download"),
    "org/name": ("does not exist", "hf download org/name"),
    "runs/nothing/here": ("does not exist", "step folder"),
}


def message(path: Path | str) -> str:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(path)
    return str(error.value)


def check(path: Path | str, wanted: tuple[str, ...]) -> None:
    found = message(path)
    assert all(words in found for words in wanted), (str(path), found)
    assert "{" not in found


def test_every_foreign_format_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, (names, wanted) in enumerate(FOLDERS.items()):
        folder = tmp_path / f"{index}"
        folder.mkdir()
        for name in names.split():
            (folder / name).mkdir() if name.endswith("/") else (folder / name).write_bytes(b"x")
        check(folder, wanted)
    for name, wanted in FILES.items():
        (tmp_path / name).write_bytes(b"x")
        check(tmp_path / name, wanted)
    monkeypatch.chdir(tmp_path)
    for address, wanted in ADDRESSES.items():
        check(address, wanted)
    os.symlink(tmp_path / "gone", tmp_path / "link")
    check(tmp_path / "link", ("is a link to", "gone, which does not exist"))
    (tmp_path / "snapshot").mkdir()
    os.symlink("../blobs/gone", tmp_path / "snapshot" / "model.safetensors")
    check(tmp_path / "snapshot", ("model.safetensors is a link to ../blobs/gone, which does not exist",))


def test_a_file_of_any_name_is_recognized_by_its_content(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "torch", "w") as archive:  # as torch.save writes it
        archive.writestr("archive/data.pkl", b"")
    (tmp_path / "old_torch").write_bytes(b"\x80\x02}q\x00.")
    (tmp_path / "llama").write_bytes(b"GGUF\x03\x00")
    with zipfile.ZipFile(tmp_path / "zipped", "w") as archive:
        archive.writestr("config.json", "{}")
    with tarfile.open(tmp_path / "tarred", "w") as tar:
        tar.addfile(tarfile.TarInfo("config.json"), io.BytesIO())
    (tmp_path / "nothing").write_bytes(b"")
    for name, wanted in (
        ("torch", "PyTorch pickle"),
        ("old_torch", "PyTorch pickle"),
        ("llama", "GGUF"),
        ("zipped", "archive"),
        ("tarred", "archive"),
        ("nothing", "is a file"),
    ):
        check(tmp_path / name, (wanted,))


def test_a_command_ends_with_the_message_and_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for command in (["inspect"], ["verify"], ["export", str(tmp_path / "out")], ["generate", "hello"]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 3
        assert "holds weights as PyTorch pickles" in capsys.readouterr().err
    assert main(["generate", "s3://bucket/model", "hello"]) == 3
    assert "an address (s3)" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["pytorch_model.bin"]


def test_weights_that_transformers_would_not_load_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).read("a").shape == (2,)
    for name, content, words in (
        ("config.json", '{"transformers_weights": "other.safetensors"}', "transformers_weights = 'other.safetensors'"),
        ("adapter_config.json", "{}", "an adapter (PEFT"),
        ("shard-00001-model-00001-of-00001.safetensors", "", "distributed checkpoint"),
    ):
        (tmp_path / name).write_text(content)
        check(tmp_path, (words, "remove"))
        (tmp_path / name).unlink()


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    check(tmp_path, ("Git LFS pointer", "git lfs pull"))
