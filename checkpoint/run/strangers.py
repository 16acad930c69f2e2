"""Files in a checkpoint's folder that are none of its own: most are harmless, some would be loaded in its place."""

from fnmatch import fnmatchcase
from typing import Final

from ..files import lookup
from ..format.manifest import COMMIT, MANIFEST, PARTS
from ..read import hugging_face as hf
from ..read.reader import Checkpoint
from ..read.verify import Problem

_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_WEIGHTS: Final = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5")


def own_files(checkpoint: Checkpoint) -> set[str]:
    """The files that make a checkpoint, relative to its folder; of a Hugging Face folder only weights and index."""
    if checkpoint.manifest is None:
        own = {chunk.file for chunks in checkpoint.chunks.values() for chunk in chunks}
        return own if hf.SINGLE in own else own | {hf.INDEX}
    parts = checkpoint.parts
    data = {name for part in parts.values() for name in part.files}
    return {COMMIT, MANIFEST, *(f"{PARTS}/{name}" for name in parts), *checkpoint.manifest.files, *data}


def find_strangers(checkpoint: Checkpoint) -> tuple[list[Problem], list[str]]:
    """Weight files that `transformers` would load instead of the checkpoint's, or besides; and notes about others.

    Of a Hugging Face folder, where anything may lie, notes are about weight files alone.
    """
    path, own = checkpoint.path, own_files(checkpoint)
    if checkpoint.manifest is None:
        others = [name for name in _names(checkpoint, own) if _is_any(name, _WEIGHTS)]
        return [], [f"{path / name} is not read: {_what_counts(own)}." for name in others]
    others = foreign_names(checkpoint)
    wrong = [name for name in others if hf.is_preferred(name) or (name in _PICKLES and hf.INDEX not in own)]
    problems = [
        Problem(name, f"{path / name} is none of this checkpoint's files, and `transformers` would load it. Remove it.")
        for name in wrong
    ]
    left = [name for name in others if name not in wrong]
    return problems, [f"{path / name} is none of this checkpoint's files." for name in left]


def foreign_names(checkpoint: Checkpoint) -> list[str]:
    """What is in a tk checkpoint's folder, and in its parts/, that no save wrote."""
    own = own_files(checkpoint)
    parts = [f"{PARTS}/{name}" for name in lookup.list_names(checkpoint.path / PARTS)]
    return [*_names(checkpoint, own | {PARTS}), *(name for name in parts if name not in own)]


def _names(checkpoint: Checkpoint, own: set[str]) -> list[str]:
    return [name for name in lookup.list_names(checkpoint.path) if name not in own]


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _what_counts(own: set[str]) -> str:
    return f"{hf.SINGLE} counts" if hf.SINGLE in own else f"{hf.INDEX} does not name it"
