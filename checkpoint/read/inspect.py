"""A summary of a checkpoint as plain data, for `tk inspect` and for users' scripts."""

import math
from typing import Any

from ...core import dtypes
from .reader import Checkpoint


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns a JSON-serializable summary: kind, step, layout, sizes, and each tensor's shape, split and slots.

    Raises:
        CheckpointError: the metadata, the sizes or the headers of the files are not those that were written.
    """
    checkpoint.check()
    stored, record = checkpoint.manifest.tensors, checkpoint.manifest.adapter
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
        "kind": checkpoint.folder.kind,
        "step": checkpoint.step,
        "manifest_sha256": checkpoint.manifest_sha256,
        "layout": checkpoint.layout.to_json(),
        "parameters": sum(math.prod(tensor.shape) for tensor in stored.values()),
        "slot_bytes": slots,
        "files": dict(checkpoint.folder.file_sizes()),
        "tensors": tensors,
        "aliases": dict(checkpoint.aliases),
        "resume": dict(checkpoint.resume),
        "adapter": record.to_json() if record else None,
        "skipped": list(checkpoint.skipped),
    }
