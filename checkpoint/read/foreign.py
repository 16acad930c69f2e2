"""Messages for paths that hold no checkpoint that tk reads: the format that was found, and how to convert it."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from ...core.given_paths import near_path
from ..files import lookup, storage

_URL: Final = re.compile(r"([a-z][a-z0-9+.-]+):/+(\S+)")
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_SAVE_AGAIN: Final = "load it with transformers and call save_pretrained(), which writes a folder that tk reads"
_AS_SAFETENSORS: Final = "save its weights as safetensors under the names that transformers gives them"
_PICKLE: Final = f"tk reads no pickles, because reading one runs code from the file; {_SAVE_AGAIN}"
_GGUF: Final = "is a GGUF file (llama.cpp): load it with transformers (gguf_file=) and call save_pretrained()"
_TORCH: Final = f"is a PyTorch pickle: {_PICKLE}"
_KERAS: Final = f"is a Keras model: {_AS_SAFETENSORS}"
_ARCHIVE: Final = "is an archive: unpack it and name the folder inside"

Kinds = Sequence[tuple[Sequence[str], str]]

# Name patterns ("NAME/" for folders), and the text for a folder that holds a matching name. The first match is used.
_FOLDERS: Final[Kinds] = (
    (
        ("adapter_model.bin", "adapter_model.pt"),
        "holds an adapter (PEFT) as a PyTorch pickle ({name}): tk reads no pickles, because reading one runs code from "
        "the file; load it with peft and call save_pretrained(), which writes adapter_model.safetensors",
    ),
    (
        ("adapter_config.json", "adapter_model.*"),
        "holds one part of an adapter (PEFT, {name}): adapter_config.json and adapter_model.safetensors belong "
        "together; is the download complete?",
    ),
    (
        ("*.distcp", ".metadata", "shard-*-model-*-of-*.safetensors"),
        "is a distributed checkpoint of PyTorch (DCP, {name}): dcp_to_torch_save of torch.distributed.checkpoint."
        "format_utils makes one file of it; load that file into the model and call save_pretrained()",
    ),
    (
        ("global_step*/", "zero_to_fp32.py", "*_optim_states.pt", "*_model_states.pt"),
        "is a DeepSpeed checkpoint ({name}): run its zero_to_fp32.py with --safe_serialization, which writes the "
        "weights as safetensors, and put config.json beside them",
    ),
    (
        ("iter_*/", "latest_checkpointed_iteration.txt", "mp_rank_*/"),
        "is a Megatron-LM checkpoint ({name}): convert it to a Hugging Face folder with Megatron's tools/checkpoint",
    ),
    (
        ("*.gguf",),
        "holds a GGUF file (llama.cpp): load it with transformers (gguf_file={name}) and call save_pretrained()",
    ),
    (("checkpoint-*/",), "holds the checkpoints of a transformers Trainer: name one of them, e.g. {path}/{name}"),
    (
        ("snapshots/",),
        "is a repository of the Hugging Face hub's cache: name one of its snapshots, {path}/snapshots/REVISION",
    ),
    (
        ("model.*.safetensors", "model.safetensors.index.*.json"),
        f"holds only a variant of the weights ({{name}}) and no model.safetensors: {_SAVE_AGAIN} (variant=)",
    ),
    (
        ("tokens.bin",),
        "is a token folder, which holds data and no model: [data] sources of a training configuration names it",
    ),
    (("*.bin", "*.pt", "*.pth", "*.ckpt"), f"holds weights as PyTorch pickles ({{name}}): {_PICKLE}"),
    (
        ("*.safetensors",),
        "holds {name}, but neither model.safetensors nor model.safetensors.index.json: if it is the whole model, "
        f"rename it to model.safetensors; otherwise {_SAVE_AGAIN}",
    ),
    (
        ("*.msgpack", "_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "*.orbax*"),
        f"is a checkpoint of JAX (flax or orbax, {{name}}): {_AS_SAFETENSORS}",
    ),
    (
        ("*.h5", "*.keras", "saved_model.pb", "*.ckpt.index"),
        f"is a TensorFlow or Keras model ({{name}}): {_AS_SAFETENSORS}",
    ),
    (("*.onnx",), "holds an ONNX graph ({name}), not a checkpoint: name the folder that it was exported from"),
    (("*.npz",), f"holds arrays of numpy or MLX ({{name}}): {_AS_SAFETENSORS}"),
    (("*.tmp-*/", "*.bad-*/"), "holds no usable step, only {name}: a save that never finished, or a damaged step"),
    (
        ("LOCK", "metrics.jsonl"),
        "is a run that has saved no step yet: wait for [checkpoint] every steps, or for the end of the training",
    ),
    (("tokenizer*.json", "tokenizer.model", "spiece.model", "vocab.*"), "holds a tokenizer and no weights"),
    (("config.json",), "holds a config.json and no weights: model.safetensors is missing; is the download complete?"),
)
_FILES: Final[Kinds] = (
    (
        ("*.safetensors",),
        "is one safetensors file: name its folder, which must hold it as model.safetensors beside a config.json",
    ),
    (("*.json", "*.jsonl", "COMMIT", "LATEST", "LOCK"), "is a file inside a checkpoint or a run: name its folder"),
    (("*.gguf",), _GGUF),
    (("*.bin", "*.pt", "*.pth", "*.ckpt", "*.distcp", "*.pkl"), _TORCH),
    (("*.onnx",), "is an ONNX graph, not a checkpoint: name the folder that it was exported from"),
    (("*.msgpack",), f"is a checkpoint of flax: {_AS_SAFETENSORS}"),
    (("*.h5", "*.keras"), _KERAS),
    (("*.npz", "*.npy"), f"holds arrays of numpy or MLX: {_AS_SAFETENSORS}"),
    (("*.tar", "*.tar.*", "*.tgz", "*.zip", "*.7z", "*.gz", "*.zst", "*.nemo"), _ARCHIVE),
)
_MAGIC: Final = (  # (bytes, their offset, text) for files that no name pattern matches
    (b"GGUF", 0, _GGUF),
    (b"\x89HDF", 0, _KERAS),
    (b"ustar", 257, _ARCHIVE),
    (b"\x1f\x8b", 0, _ARCHIVE),
    (b"\x80", 0, _TORCH),
)
_MARKS: Final = ("step-*", "manifest.json", "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
_MOST_LOOKED_INTO: Final = 100  # folders inside a folder
_A_CHECKPOINT_IS: Final = "a checkpoint is a step folder, a run folder, a Hugging Face folder or a PEFT folder"


def describe(path: Path) -> str:
    """Returns one or two sentences about a path that tk cannot read: the format that was found, and a remedy."""
    if lookup.is_dir(path):
        return _describe_folder(path)
    if lookup.exists(path):
        text = _match(_FILES, [path.name])[0] or _content(path) or f"is a file; {_A_CHECKPOINT_IS}"
        return f"{path} {text}."
    return _describe_missing(path)


def _describe_missing(path: Path) -> str:
    url = _URL.fullmatch(str(path))
    if url:
        return (
            f"{url[1]}://{url[2]} is an address ({url[1]}); checkpoints are read from folders. Download it (from the "
            f"Hugging Face hub: hf download OWNER/NAME --local-dir DIR) or mount it, and name the local folder."
        )
    if lookup.is_link(path):
        return f"{path} is a link to {path.readlink()}, which does not exist."
    if _HUB_ID.fullmatch(str(path)) and not lookup.exists(path.parent):
        return (
            f"{path} does not exist; {_A_CHECKPOINT_IS}. Download a repository of the Hugging Face hub with "
            f"hf download {path} --local-dir DIR, and name DIR."
        )
    return f"{path} does not exist; {_A_CHECKPOINT_IS}.{near_path(path)}"


def _describe_folder(path: Path) -> str:
    names = lookup.list_names(path)
    if not names:
        return f"{path} holds no checkpoint: the folder is empty; {_A_CHECKPOINT_IS}."
    dangling = [name for name in names if lookup.is_link(path / name) and not lookup.exists(path / name)]
    if dangling:
        target = (path / dangling[0]).readlink()
        return f"{path} holds no checkpoint: {dangling[0]} is a link to {target}, which does not exist."
    text, name = _match(_FOLDERS, [f"{name}/" if lookup.is_dir(path / name) else name for name in names])
    if text:
        return f"{path} {text.replace('{name}', name).replace('{path}', str(path))}."
    if inside := _checkpoints_in(path, names):
        return f"{path} holds no checkpoint itself, but folders with some: name one of them, e.g. {path / inside[0]}."
    return (
        f"{path} holds no checkpoint: neither a manifest.json (a step), step-* folders (a run), nor "
        f"model.safetensors.index.json or model.safetensors (Hugging Face), nor adapter_config.json (PEFT)."
    )


def _checkpoints_in(path: Path, names: Sequence[str]) -> list[str]:
    """Returns the first folder of a folder that holds a run, a step or a model; none if there is none."""
    for name in sorted(names)[:_MOST_LOOKED_INTO]:
        inner = path / name
        if lookup.is_dir(inner) and any(
            fnmatchcase(each, mark) for each in lookup.list_names(inner) for mark in _MARKS
        ):
            return [name]
    return []


def _match(kinds: Kinds, names: Sequence[str]) -> tuple[str, str]:
    """Returns the text of the first kind that matches a name, and that name; empty strings if none does."""
    for patterns, text in kinds:
        for name in names:
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return text, name.rstrip("/")
    return "", ""


def _content(path: Path) -> str:
    """Returns the text for a file by its first bytes; "" if they are not known."""
    if not path.is_file():
        return ""
    with storage.reading(path.resolve()) as fd:
        head = bytearray(512)
        count = storage.pread(fd, memoryview(head), 0)
    import zipfile  # with its decompressors, which no checkpoint needs

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickled = any(name.endswith("data.pkl") for name in archive.namelist())
        return _TORCH if pickled else _ARCHIVE  # torch.save writes a zip with a pickle in it
    return next((text for magic, at, text in _MAGIC if head[:count].startswith(magic, at)), "")
