"""The names of an adapter's tensors in PEFT's files: those of the model, behind a prefix."""

from collections.abc import Collection, Iterable
from typing import Final

from ...core.errors import ManifestError

PREFIX: Final = "base_model.model."
_WRAPPED: Final = ".base_layer.bias"  # the bias of a module that PEFT has wrapped, because it has an adapter


def key_of(name: str, adapted: Collection[str]) -> str:
    """Returns the key of a tensor in PEFT's file.

    Args:
        name: the tensor's name in the model.
        adapted: the modules that have an adapter.
    """
    module, _, leaf = name.rpartition(".")
    wrapped = leaf == "bias" and module in adapted
    return f"{PREFIX}{module}{_WRAPPED}" if wrapped else f"{PREFIX}{name}"


def names_of(keys: Iterable[str], where: str) -> dict[str, str]:
    """Returns the name in the model of each key.

    Args:
        keys: the keys of a file of PEFT.
        where: the file, for messages.

    Raises:
        ManifestError: a key has another prefix, or two keys have one name.
    """
    names: dict[str, str] = {}
    taken: dict[str, str] = {}
    for key in keys:
        name = key.removeprefix(PREFIX)
        if name in (key, ""):
            raise ManifestError(
                f"{where} holds {key[:200]!r}; the tensors of an adapter have names that begin with {PREFIX!r}. Save "
                "the adapter with peft's save_pretrained()."
            )
        if name.endswith(_WRAPPED):
            name = f"{name.removesuffix(_WRAPPED)}.bias"
        if name in taken:
            raise ManifestError(
                f"{where} holds {taken[name]!r} and {key!r}, which are both {name} of the model. Remove one of the two."
            )
        names[key], taken[name] = name, key
    return names
