"""The index of a Hugging Face folder, model.safetensors.index.json, as plain data."""

from collections.abc import Iterable, Mapping
from typing import Any

from ...core.geometry import Box
from .chunk import Part


def weight_index(parts: Iterable[Part], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """Returns the index of the weights in `parts`; None unless every weight is stored as a whole tensor."""
    chunks = [chunk for part in parts for chunk in part.chunks if chunk.slot == "weight"]
    if any(chunk.flat is not None or chunk.box != Box.whole(shapes[chunk.tensor]) for chunk in chunks):
        return None
    weight_map = {chunk.tensor: chunk.file for chunk in sorted(chunks, key=lambda chunk: chunk.tensor)}
    return {"metadata": {"total_size": sum(chunk.nbytes for chunk in chunks)}, "weight_map": weight_map}
