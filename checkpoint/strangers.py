"""Files in a checkpoint's folder that are none of its own: most are harmless, some would be loaded in its place."""

from fnmatch import fnmatchcase
from typing import Final

from . import hf, storage
from .manifest import COMMIT, MANIFEST, PARTS
from .reader import Checkpoint
from .verify import Problem

_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WEIGHTS: Final = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")


def find_strangers(checkpoint: Checkpoint) -> tuple[list[Problem], list[str]]:
    """Weight files that `transformers` would load instead of the checkpoint's, or besides; and notes about others.

    Of a Hugging Face folder, where anything may lie, notes are about weight files alone.
    """
    path = checkpoint.path
    if checkpoint.manifest is None:
        own = {chunk.file for chunks in checkpoint.chunks.values() for chunk in chunks}
        own |= set() if hf.SINGLE in own else {hf.INDEX}
        others = [name for name in _names(checkpoint, own) if _is_any(name, _WEIGHTS)]
        return [], [f"{path / name} is not read: {_what_counts(own)}." for name in others]
    own = {COMMIT, MANIFEST, PARTS, *checkpoint.manifest.files}
    own |= {name for part in checkpoint.parts.values() for name in part.files}
    others = _names(checkpoint, own)
    wrong = [name for name in others if hf.is_preferred(name) or (name in _PICKLES and hf.INDEX not in own)]
    problems = [
        Problem(name, f"{path / name} is none of this checkpoint's files, and `transformers` would load it. Remove it.")
        for name in wrong
    ]
    parts = [f"{PARTS}/{name}" for name in storage.list_names(path / PARTS) if name not in checkpoint.manifest.parts]
    left = [*(name for name in others if name not in wrong), *parts]
    return problems, [f"{path / name} is none of this checkpoint's files." for name in left]


def _names(checkpoint: Checkpoint, own: set[str]) -> list[str]:
    return [name for name in storage.list_names(checkpoint.path) if name not in own]


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _what_counts(own: set[str]) -> str:
    return f"{hf.SINGLE} counts" if hf.SINGLE in own else f"{hf.INDEX} does not name it"
