"""The keys of config.json for sliding windows of attention, per layer."""

from collections.abc import Mapping
from typing import Any

from .shape import FULL, SLIDING, ModelShape


def windows(config: ModelShape) -> list[int | None]:
    """Returns each layer's window: by `layer_types` if they are set, else all but the first `max_window_layers`."""
    kinds = config.layer_types or usual_types(config.num_hidden_layers, config.sliding_window, config.max_window_layers)
    return [config.sliding_window if kind == SLIDING else None for kind in kinds]


def usual_types(num_layers: int, window: int | None, num_full: int) -> list[str]:
    """Returns the layer types of a config without `layer_types`."""
    return [SLIDING if window is not None and layer >= num_full else FULL for layer in range(num_layers)]


def read_windows(values: Mapping[str, Any], kinds: object, *, per_layer: bool) -> dict[str, Any]:
    """Returns the fields of sliding windows: `sliding_window`, `max_window_layers` and `layer_types`.

    Args:
        values: the keys that make the model. `use_sliding_window` switches Qwen's window on; other architectures, which
            lack the key, use theirs if they have one.
        kinds: `layer_types` of config.json; None without it.
        per_layer: whether the architecture reads `layer_types`; if not, they must say what its other keys do.

    Raises:
        ValueError: `layer_types` has an entry that is no type, another length than the model, or sliding windows where
            the model has none.
    """
    switch = values.get("use_sliding_window", True)
    if not isinstance(switch, bool):
        raise ValueError(f"use_sliding_window = {switch!r} must be true or false")
    window, num_full = values.get("sliding_window") if switch else None, values.get("max_window_layers", 0)
    if not isinstance(num_full, int) or num_full < 0:
        raise ValueError(f"max_window_layers = {num_full!r} must be a number of layers")
    usual = {"sliding_window": window, "max_window_layers": None if window is None else num_full, "layer_types": None}
    if kinds is None:
        return usual
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise ValueError(f"layer_types = {kinds!r} must be a list of {FULL!r} and {SLIDING!r}")
    if len(kinds) != values["num_hidden_layers"]:
        raise ValueError(
            f"layer_types has {len(kinds)} entries, and num_hidden_layers = {values['num_hidden_layers']!r}"
        )
    if kinds == usual_types(len(kinds), window, num_full):
        return usual
    if SLIDING in kinds and window is None:
        raise ValueError(f"layer_types has {SLIDING!r}, but sliding_window is not set, or use_sliding_window is false")
    if not per_layer:
        raise ValueError(
            f"layer_types = {kinds} is not supported for this architecture, whose layers all have sliding_window = "
            f"{window}; it must be missing, or the same for all layers"
        )
    return usual | {"max_window_layers": None, "layer_types": kinds}


def write_switch(config: ModelShape) -> dict[str, Any]:
    """Returns Qwen's key of config.json that switches the window on."""
    return {"use_sliding_window": config.sliding_window is not None}
