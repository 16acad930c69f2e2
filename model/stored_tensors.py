"""The comparison of a checkpoint's tensors with those of a model, before a load."""

from collections.abc import Sequence
from typing import Final

from ..checkpoint.convert.tensor_values import equal_tensors
from ..checkpoint.read.reader import Checkpoint
from ..core.errors import ShapeMismatch
from ..core.tensors import Table, TensorSpec
from .stored_config import stores_both

_ADVICE: Final = "The two are of different models, or a file is missing: copy both from one place."


def check_ties(table: Table, checkpoint: Checkpoint) -> None:
    """Checks that tensors which the model ties have equal values if the checkpoint stores both.

    Raises:
        ShapeMismatch: two tied tensors differ.
    """
    for spec in table:
        if stores_both(checkpoint, spec.name, spec.alias) and not equal_tensors(checkpoint, spec.name, spec.alias):
            raise ShapeMismatch(
                f"{checkpoint.path} stores {spec.name} with other values than {spec.alias}, and a model that ties the "
                "two would lose them: set tie_word_embeddings = false."
            )


def check_tensors(specs: Sequence[TensorSpec], checkpoint: Checkpoint) -> None:
    """Checks that the checkpoint has every tensor in its shape.

    Raises:
        ShapeMismatch: a tensor is missing or has another shape.
    """
    for spec in specs:
        name = spec.alias or spec.name
        found = checkpoint.tensors.get(name)
        if found is None:
            raise ShapeMismatch(f"{checkpoint.path} has no tensor {name}, which its config.json requires. {_ADVICE}")
        if tuple(found.shape) != spec.shape:
            raise ShapeMismatch(
                f"{checkpoint.path}: {name} has shape {list(found.shape)}, but config.json requires "
                f"{list(spec.shape)}. {_ADVICE}"
            )
