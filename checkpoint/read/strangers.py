"""Files of other programs in a sealed folder: weights that they would load in place of the sealed ones, or beside them.

`save_pretrained` into an exported folder leaves the seal and its files as they were. Two models then lie in one folder,
and a reader of either would be right; so such a folder is refused.
"""

import re
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError
from ...core.file_names import some_names
from ..format.manifest import COMMIT, MANIFEST, PARTS, Manifest

_WEIGHTS: Final = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.msgpack", "*.h5"),
    *("adapter_config.json", "adapter_model.*", "*.distcp"),
)
_SEALED: Final = re.compile(r"(?:model|optim-.+)-(\d{5,})(?:-\d+)?\.safetensors")


def looks_like_weights(name: str) -> bool:
    """Returns whether a file's name is that of weights, an index or an adapter; hidden files never count."""
    return not name.startswith(".") and any(fnmatchcase(name.lower(), pattern) for pattern in _WEIGHTS)


def refuse_strangers(
    folder: Path,
    names: Sequence[str],
    manifest: Manifest,
    own: Callable[[], Collection[str]],
    changed: Callable[[], Sequence[str]],
) -> None:
    """Raises CheckpointError, which is no damage, if a sealed folder holds weights that are not the sealed ones.

    Args:
        folder: a sealed checkpoint's folder.
        names: the names in it.
        manifest: the sealed checkpoint's metadata.
        own: returns all files of the checkpoint, from its parts; called only if a name is not that of a sealed file.
        changed: returns the side files that differ from the sealed ones, for the message.
    """
    strange = [name for name in names if looks_like_weights(name) and not _is_sealed(name, manifest)]
    if strange:
        known = own()
        strange = [name for name in strange if name not in known]
    if strange:
        sealed = [name for name in names if name.endswith(".safetensors") and name not in strange]
        raise CheckpointError(_message(folder, manifest.step, sealed, strange, changed()))


def _is_sealed(name: str, manifest: Manifest) -> bool:
    """Returns whether a name is in the manifest, or is that of a file of one of its parts."""
    found = _SEALED.fullmatch(name)
    return name in manifest.files or (found is not None and f"{found[1]}.json" in manifest.parts)


def _message(folder: Path, step: int, sealed: Sequence[str], strange: Sequence[str], changed: Sequence[str]) -> str:
    ours, theirs = some_names(sealed), some_names(strange)
    edits = f", and changed {some_names(changed)}" if changed else ""
    text = (
        f"{folder} holds two models. The sealed checkpoint is {ours} with {COMMIT}, {MANIFEST} and {PARTS}/ (step "
        f"{step}). Later another program put {theirs} there{edits}. To keep the sealed checkpoint, move {theirs} out "
        f"of the folder{' and restore the changed files' if changed else ''}. "
    )
    if all(name.startswith("adapter_") for name in strange):
        return f"{text}To use the adapter, move it into a folder of its own; tk export --merge joins it with {folder}."
    return (
        f"{text}To use the other model, move {ours}, {COMMIT}, {MANIFEST} and {PARTS}/ away: the rest is then read as "
        "a folder of other programs."
    )
