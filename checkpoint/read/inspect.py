"""What a checkpoint holds, as plain data: for `tk inspect`, and for people's own scripts."""

import math
from typing import Any

from ...core import dtypes
from .reader import Checkpoint


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """A summary that json can write: kind, step, layout, sizes, and every tensor with its shape, split and slots."""
    files = _files(checkpoint)
    stored = {name: checkpoint.tensors[name] for name, slot in checkpoint.chunks if slot == "weight"}
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "slots": dict(tensor.slots),
            "split_dim": tensor.split.dim if tensor.split else None,
            "bytes": math.prod(tensor.shape) * sum(dtypes.by_code(code).itemsize for code in tensor.slots.values()),
        }
        for name, tensor in stored.items()
    }
    slots: dict[str, int] = {}
    for (_, slot), chunks in checkpoint.chunks.items():
        slots[slot] = slots.get(slot, 0) + sum(chunk.nbytes for chunk in chunks)
    return {
        "path": str(checkpoint.path),
        "kind": "tk" if checkpoint.manifest else "huggingface",
        "step": checkpoint.step,
        "manifest_sha256": checkpoint.manifest_sha256,
        "layout": checkpoint.layout.to_json(),
        "parameters": sum(math.prod(tensor.shape) for tensor in stored.values()),
        "slot_bytes": slots,
        "files": files,
        "tensors": tensors,
        "aliases": dict(checkpoint.aliases),
        "resume": dict(checkpoint.resume),
        "skipped": list(checkpoint.skipped),
    }


def _files(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of each data file."""
    if checkpoint.manifest:
        return {name: known.size for part in checkpoint.parts.values() for name, known in part.files.items()}
    names = sorted({chunk.file for chunks in checkpoint.chunks.values() for chunk in chunks})
    return {name: checkpoint.data_path(name).stat().st_size for name in names}
