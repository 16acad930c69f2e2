"""What other programs do to a checkpoint's folder between two commands of ours.

A writer gets the folder, changes it or makes another one from it, and returns the folder to open. Each says how our
next command must end: SAME (the bytes that we wrote), THEIRS (what `from_pretrained` reads there now), or words of a
refusal.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from tk.tests.model.tiny_llama import TINY_LLAMA

SAME: Final = "same"
THEIRS: Final = "theirs"
POINTER: Final = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123\n"


@dataclass(frozen=True)
class Writer:
    """A writer, and the outcome for a sealed folder and for a plain Hugging Face folder."""

    write: Callable[[Path], Path]
    sealed: str
    plain: str


def other_model(**changes: Any) -> Any:
    """A model with other weights than ours, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**TINY_LLAMA | changes, tie_word_embeddings=False)).to(torch.bfloat16)


def saved_over(folder: Path, **options: Any) -> Path:
    """`save_pretrained` of a model with the same shapes, as after a fine-tuning."""
    other_model().save_pretrained(folder, **options)
    return folder


def _other_shapes(folder: Path) -> Path:
    other_model(intermediate_size=24).save_pretrained(folder)
    return folder


def _pickle(folder: Path) -> Path:
    """No reader of ours looks into it, so any bytes do."""
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    return folder


def _adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
    save_file({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)}, folder / "a")
    os.replace(folder / "a", folder / "adapter_model.safetensors")
    return folder


def _gguf(folder: Path) -> Path:
    (folder / "model-q4_k_m.gguf").write_bytes(b"GGUF\x03\x00")
    return folder


def edit_config(folder: Path) -> Path:
    """Another value of a key, of the same length."""
    path = folder / "config.json"
    text = path.read_text()
    assert '"vocab_size": 101' in text
    path.write_text(text.replace('"vocab_size": 101', '"vocab_size":  101'))
    return folder


def _edit_index(folder: Path) -> Path:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["note"] = "edited"
    path.write_text(json.dumps(index))
    return folder


def _junk(folder: Path) -> Path:
    for place in (folder, folder / "parts"):
        if place.is_dir():
            for name in (
                ".DS_Store",
                "._model-00000.safetensors",
                "._config.json",
                "._adapter_config.json",
                "Thumbs.db",
            ):
                (place / name).write_bytes(b"\0\5\26\7")
    for name in ("._model.safetensors", "._COMMIT", "._model.safetensors.index.json", "desktop.ini", ".nfs0001"):
        (folder / name).write_bytes(b"\0\5\26\7")
    (folder / "__MACOSX").mkdir()
    return folder


def _run(*words: str | Path) -> None:
    subprocess.run(words, check=True)


def _beside(folder: Path, name: str) -> Path:
    (folder.parent / name).mkdir()
    return folder.parent / name / folder.name


def _cp(folder: Path) -> Path:
    _run("cp", "-r", folder, _beside(folder, "copy"))
    return folder.parent / "copy" / folder.name


def _hard_links(folder: Path) -> Path:
    _run("cp", "-al", folder, _beside(folder, "links"))
    return folder.parent / "links" / folder.name


def _hard_links_then_saved(folder: Path) -> Path:
    """A clone by hard links, into which another model is saved: config.json is written in place, in both folders."""
    saved_over(_hard_links(folder))
    return folder


def _rsync(folder: Path) -> Path:
    target = _beside(folder, "synced")
    _run("rsync", "-a", f"{folder}/", f"{target}/")
    return target


def _rsync_broken_off(folder: Path) -> Path:
    copy = _cp(folder)
    data = weights(copy)[-1]
    data.rename(copy / f".{data.name}.x3Yz9a")
    return copy


def _dvc(folder: Path) -> Path:
    """Files in a cache by their MD5, and absolute links to them, read-only: `dvc checkout` with cache.type symlink."""
    cache = folder.parent / ".dvc" / "cache" / "files" / "md5"
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        code = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        (cache / code[:2]).mkdir(parents=True, exist_ok=True)
        kept = cache / code[:2] / code[2:]
        os.replace(path, kept)
        kept.chmod(0o444)
        path.symlink_to(kept)
    return folder


def _dvc_without_cache(folder: Path) -> Path:
    _dvc(folder)
    shutil.rmtree(folder.parent / ".dvc")
    return folder


def hub_cache(source: Path, cache: Path) -> Path:
    """The folder as it lies in the hub's cache after a download: every file a link, large ones by way of another."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    (cache / "blobs" / "ab").mkdir(parents=True)
    for path in [path for path in source.rglob("*") if path.is_file()]:
        code = hashlib.sha256(path.read_bytes()).hexdigest()
        blob, link = repository / "blobs" / code, snapshot / path.relative_to(source)
        if path.suffix == ".safetensors":
            (cache / "blobs" / "ab" / code).write_bytes(path.read_bytes())
            blob.symlink_to(f"../../blobs/ab/{code}")
        else:
            blob.write_bytes(path.read_bytes())
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def _farm(folder: Path) -> Path:
    """`ln -s MODEL/* .`: links to every file, and to the folder of the parts."""
    farm = folder.parent / "farm"
    farm.mkdir()
    for path in folder.iterdir():
        (farm / path.name).symlink_to(os.path.relpath(path, farm))
    return farm


def _link_to_folder(folder: Path) -> Path:
    link = folder.parent / "current"
    link.symlink_to(folder.name)
    return link


def weights(folder: Path) -> list[Path]:
    """The files of weights."""
    return sorted(folder.glob("model*.safetensors"))


def _pointers(folder: Path) -> Path:
    for path in weights(folder):
        path.write_text(POINTER)
    return folder


def _config_pointer(folder: Path) -> Path:
    (folder / "config.json").write_text(POINTER)
    return folder


def _truncated(folder: Path) -> Path:
    copy = _cp(folder)
    os.truncate(weights(copy)[-1], weights(copy)[-1].stat().st_size // 2)
    return copy


def _empty_file(folder: Path) -> Path:
    os.truncate(weights(folder)[0], 0)
    return folder


def _empty_config(folder: Path) -> Path:
    os.truncate(folder / "config.json", 0)
    return folder


def _deleted(folder: Path) -> Path:
    weights(folder)[0].unlink()
    return folder


def _without_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").unlink()
    return folder


def _without_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def _without_commit(folder: Path) -> Path:
    (folder / "COMMIT").unlink(missing_ok=True)
    return folder


def _capitals(folder: Path) -> Path:
    """A copy by way of a file system without lower case."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rename(path.with_name(path.name.upper()))
    return folder


def _without_seal(folder: Path) -> Path:
    """The advice of the refusal: another model was saved into the folder, and the sealed one is taken away."""
    sealed = weights(folder)
    saved_over(folder)
    for path in (*sealed, folder / "COMMIT", folder / "manifest.json"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "parts", ignore_errors=True)
    return folder


def _moved_out(folder: Path) -> Path:
    """The other advice: the files that came later are taken away."""
    config = (folder / "config.json").read_bytes()
    saved_over(folder)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_bytes(config)
    (folder / "generation_config.json").unlink()
    return folder


WRITERS: Final[dict[str, Writer]] = {
    "transformers, one file": Writer(saved_over, "put model.safetensors there, and changed config.json", THEIRS),
    "transformers, shards": Writer(
        lambda folder: saved_over(folder, max_shard_size="20kB"), "put model-00001-of-", THEIRS
    ),
    "transformers, a variant": Writer(
        lambda folder: saved_over(folder, variant="fp16"), "put model.fp16.safetensors there", SAME
    ),
    "transformers, other shapes": Writer(_other_shapes, "put model.safetensors there", THEIRS),
    "transformers, and the seal removed": Writer(_without_seal, THEIRS, THEIRS),
    "transformers, and its files removed": Writer(_moved_out, SAME, SAME),
    "torch.save": Writer(_pickle, "put pytorch_model.bin there", SAME),
    "peft": Writer(_adapter, "put adapter_config.json, adapter_model.safetensors there", "holds an adapter"),
    "llama.cpp": Writer(_gguf, "put model-q4_k_m.gguf there", SAME),
    "an editor, config.json": Writer(edit_config, "config.json is not the file that was saved", SAME),
    "an editor, the index": Writer(_edit_index, "index.json is not the file that was saved", SAME),
    "macOS and Windows": Writer(_junk, SAME, SAME),
    "cp -r": Writer(_cp, SAME, SAME),
    "cp -al": Writer(_hard_links, SAME, SAME),
    "cp -al, and transformers in the clone": Writer(
        _hard_links_then_saved, "config.json is not the file that was saved", SAME
    ),
    **({"rsync -a": Writer(_rsync, SAME, SAME)} if shutil.which("rsync") else {}),
    "rsync, broken off": Writer(_rsync_broken_off, "safetensors is missing", "is missing"),
    "dvc": Writer(_dvc, SAME, SAME),
    "dvc, without its cache": Writer(_dvc_without_cache, "which does not exist", "which does not exist"),
    "hub cache": Writer(lambda folder: hub_cache(folder, folder.parent / "cache"), SAME, SAME),
    "ln -s of the files": Writer(_farm, SAME, SAME),
    "ln -s of the folder": Writer(_link_to_folder, SAME, SAME),
    "git without lfs": Writer(_pointers, "model-00000.safetensors is a Git LFS pointer", "is a Git LFS pointer"),
    "git without lfs, config": Writer(_config_pointer, "config.json is a Git LFS pointer", "is a Git LFS pointer"),
    "a disk that is full": Writer(_truncated, ".safetensors has", "model-00000.safetensors"),
    "a crash, weights": Writer(_empty_file, "model-00000.safetensors has 0 bytes", "has 0 bytes"),
    "rm, config.json": Writer(_without_config, "config.json is missing", ""),
    "a crash, config.json": Writer(_empty_config, "config.json is not the file", "config.json is not JSON"),
    "rm, weights": Writer(_deleted, "model-00000.safetensors is missing", "model-00000.safetensors is missing"),
    "rm, index": Writer(_without_index, "index.json is missing", "neither model.safetensors nor"),
    "rm, COMMIT": Writer(_without_commit, "has no COMMIT", SAME),
    "a disk without lower case": Writer(_capitals, "manifest.json is missing", "holds no checkpoint"),
}
