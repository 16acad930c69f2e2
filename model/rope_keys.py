"""The keys of config.json for rotary embedding, resolved in the order in which `transformers` resolves them.

A file of `transformers` 5 has `rope_parameters`; older files, and edits that the cards of models recommend, have
`rope_scaling` and `rope_theta` beside it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_CONTEXT: Final = "original_max_position_embeddings"
ROPE_KEYS: Final = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", _CONTEXT)
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor",),
    }
)
_OPTIONAL: Final = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")  # of yarn; may be null


def read_rope(
    data: Mapping[str, Any], theta: float, max_positions: object, share: float | None = None
) -> dict[str, Any]:
    """Returns the fields of rotary embedding: `rope_theta`, `rope_scaling` and perhaps `partial_rotary_factor`.

    `rope_scaling` counts before `rope_parameters`, and replaces all of it. `rope_theta` in the object counts before
    the key beside it, but `original_max_position_embeddings` beside it counts before that in the object.

    Args:
        data: the content of config.json.
        theta: the architecture's rope_theta for files without one.
        max_positions: the file's max_position_embeddings, the context of pretraining where no key gives it.
        share: the architecture's partial_rotary_factor for files without one; None if it rotates whole heads.

    Raises:
        ValueError: the keys describe an embedding that tk does not implement.
    """
    name, rope = _rope(data)
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            f"{name} has an object for {nested[0]!r}: another rotary embedding per layer type is not supported; "
            f"{name} must hold rope_type and rope_theta itself"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ("default", *_NEEDED):
        supported = ", ".join(map(repr, ("default", *_NEEDED)))
        raise ValueError(f"{name}: rope_type = {kind!r} is not supported; supported are {supported}")
    if share is None:
        _refuse_partial(name, rope, data)
    found = rope.get("rope_theta", data.get("rope_theta", theta))
    if found is None:
        raise ValueError(f"rope_theta must not be null; a file without it has {theta:g}")
    scaling = None if kind == "default" else _scaling(name, rope, data, max_positions) | {"rope_type": kind}
    values = {"rope_theta": found, "rope_scaling": scaling}
    return values if share is None else values | {"partial_rotary_factor": _share(name, rope, data, share)}


def refuse_rope(data: Mapping[str, Any]) -> None:
    """Checks that a config.json of an architecture with learned positions asks for no rotary embedding.

    Raises:
        ValueError: it does.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if data.get(key):
            raise ValueError(
                f"{key} = {data[key]!r} is not supported: the positions of this architecture are learned, not rotated; "
                "it must be missing"
            )


def lost_theta(data: Mapping[str, Any], theta: float) -> str:
    """Returns a warning if `rope_scaling` replaces a `rope_parameters` that has another rope_theta, else ""."""
    other = data.get("rope_parameters")
    if not isinstance(other, Mapping) or _rope(data)[0] != "rope_scaling":
        return ""
    found, lost = data["rope_scaling"].get("rope_theta", data.get("rope_theta", theta)), other.get("rope_theta")
    if lost is None or lost == found:
        return ""
    return (
        f"rope_scaling replaces rope_parameters, as in transformers, and its rope_theta = {lost} with it: the model "
        f"has rope_theta = {found}. Write rope_theta into rope_scaling, or the scaling into rope_parameters."
    )


def _rope(data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the key that counts, and its object; {} if neither has one."""
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    rope = data.get(name) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{name} must be an object, not {rope!r}")
    return name, rope


def _share(name: str, rope: Mapping[str, Any], data: Mapping[str, Any], share: float) -> object:
    """Returns partial_rotary_factor: in the object it counts first, and beside it null is 1."""
    if "partial_rotary_factor" not in rope:
        found = data.get("partial_rotary_factor", share)
        return 1.0 if found is None else found
    if rope["partial_rotary_factor"] is None:
        raise ValueError(f"{name}: partial_rotary_factor must not be null")
    return rope["partial_rotary_factor"]


def _refuse_partial(name: str, rope: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raises ValueError if only a part of every head is rotated."""
    inside = "partial_rotary_factor" in rope
    factor = rope["partial_rotary_factor"] if inside else data.get("partial_rotary_factor")
    if (inside or factor is not None) and (factor != 1 or isinstance(factor, bool)):
        where = f"{name}: " if inside else ""
        raise ValueError(
            f"{where}partial_rotary_factor = {factor!r} is not supported; tk rotates whole heads, so it must be 1.0 or "
            "missing"
        )


def _scaling(name: str, rope: Mapping[str, Any], data: Mapping[str, Any], max_positions: object) -> dict[str, Any]:
    """Returns the fields of the scaling, but for its type."""
    kind = rope.get("rope_type", rope.get("type"))
    context = data[_CONTEXT] if _CONTEXT in data else rope.get(_CONTEXT, max_positions)
    if kind != "linear" and context is None:
        raise ValueError(f"{_CONTEXT} must not be null")
    values = {key: rope[key] for key in _NEEDED[kind] if rope.get(key) is not None}
    if kind == "yarn":
        values |= _yarn(rope, context, max_positions)
    missing = [key for key in _NEEDED[kind] if key not in values]
    if missing:
        raise ValueError(f"{name}: {missing[0]} is missing, which rope_type = {kind!r} needs")
    return values if kind == "linear" else values | {_CONTEXT: context}


def _yarn(rope: Mapping[str, Any], context: object, max_positions: object) -> dict[str, Any]:
    """Returns YaRN's own fields; a null is a missing key, but a factor of null is the ratio of the two contexts."""
    values = {key: rope[key] for key in _OPTIONAL if rope.get(key) is not None}
    if "truncate" in rope:
        values["truncate"] = rope["truncate"]
    if "factor" in rope and rope["factor"] is None and isinstance(context, int) and isinstance(max_positions, int):
        values["factor"] = max_positions / max(1, context)
    return values
