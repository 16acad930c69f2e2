"""The checkpoint of `initialize(..., weights=FOLDER)`: compared with the module, then read, each rank its share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ...checkpoint.convert.tensor_values import equal_tensors
from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import open_together, share_errors
from ...core.dtypes import COMPUTE_DTYPES
from ...core.errors import ConfigError, ShapeMismatch
from ...model.peers import peers
from ...parallel.mesh import Group
from ...parallel.torch_dtypes import format_of
from ..engine.training_engine import TrainingEngine
from ..saving.checkpointer import Checkpointer

_FLOATS = frozenset(dtype.code for dtype in COMPUTE_DTYPES)
_SHOWN = 3  # names in a message


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """An open checkpoint whose tensors are those of a module.

    Attributes:
        checkpoint: the checkpoint, with the module's names.
        kept: the buffers that it lacks, which keep the module's values.
    """

    checkpoint: Checkpoint
    kept: frozenset[str]

    @staticmethod
    def open(folder: Path, model: nn.Module, world: Group, names: Mapping[str, str]) -> "StoredWeights":
        """Opens a step, run or Hugging Face folder; every rank calls it. Nothing of the module is changed.

        Args:
            names: the names of tensors in the module's own checkpoints, where they are not those in the module.

        Raises:
            CheckpointError: the folder cannot be used.
            ShapeMismatch: its tensors are not those of the module; the message names them.
        """
        ranks = peers(world)
        opened = open_together(lambda: Checkpoint.open(folder), ranks)
        with share_errors(ranks):
            stored, kept = _matched(model, opened, names)
        return StoredWeights(opened.also_named(stored), kept)

    def load(self, engine: TrainingEngine) -> None:
        """Reads this rank's share of the parameters, and all of what is whole on every rank; every rank calls it.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is damaged.
            ConfigError: fp16 cannot hold a value.
        """
        checkpointer = Checkpointer(engine, engine.mesh)
        checkpointer.load_weights(self.checkpoint, without=self.kept)
        with share_errors(checkpointer.ranks):
            for shard in engine.buffers.shards if engine.buffers.dtype == torch.float16 else ():
                if not engine.optimizer.read("weight", shard, *shard.flat).isfinite().all():
                    raise ConfigError(
                        f"{self.checkpoint.path}: {shard.piece.tensor.name} has values beyond fp16's largest, "
                        f"{torch.finfo(torch.float16).max:g}; take bf16."
                    )


def _matched(
    model: nn.Module, checkpoint: Checkpoint, own_names: Mapping[str, str]
) -> tuple[dict[str, str], frozenset[str]]:
    """Returns the stored name of each tensor that is stored under another of its names, and the buffers not stored.

    Raises:
        ShapeMismatch: tensors are missing, left over or of another shape or kind.
    """
    names: dict[int, list[str]] = {}
    state: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    missing, wrong = list[str](), list[str]()
    renamed, kept = dict[str, str](), set[str]()
    for first, *others in names.values():
        tensor = state[first]
        found = [name for name in (first, *others) if name in checkpoint.tensors]
        if not found:
            if isinstance(tensor, nn.Parameter):
                missing.append(first)
            else:
                kept.add(first)
            continue
        wrong += [text for name in found for text in _difference(name, tensor, checkpoint)]
        own = own_names.get(first, first)
        renamed |= {own: found[0]} if own not in found else {}
        if not wrong:
            wrong += _untied(found, checkpoint)
    computed = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    extra = checkpoint.tensors.keys() - state.keys() - computed - checkpoint.aliases.keys()
    problems = [*_list("lacks", missing), *_list("has, beside the module's tensors,", sorted(extra)), *wrong[:_SHOWN]]
    if problems:
        raise ShapeMismatch(
            f"initialize(..., weights=...): {checkpoint.path} is not of this {type(model).__name__}: it "
            f"{'; '.join(problems)}. Names are those of the module's state_dict."
        )
    return renamed, frozenset(kept)


def _difference(name: str, tensor: torch.Tensor, checkpoint: Checkpoint) -> Iterator[str]:
    """Yields what is wrong with a stored tensor."""
    stored = checkpoint.tensors[name]
    if tuple(stored.shape) != tuple(tensor.shape):
        yield f"has {name} in shape {list(stored.shape)}, where the module's is {list(tensor.shape)}"
    code, own = stored.slots["weight"], format_of(tensor.dtype).code
    if code != own and not {code, own} <= _FLOATS:
        yield f"has {name} as {code}, where the module's is {own}"


def _untied(names: Sequence[str], checkpoint: Checkpoint) -> Iterator[str]:
    """Yields names that are one tensor in the module and have several values in the checkpoint."""
    for other in names[1:]:
        same = checkpoint.aliases.get(other, other) == checkpoint.aliases.get(names[0], names[0])
        if not same and not equal_tensors(checkpoint, names[0], other):
            yield f"has other values in {other} than in {names[0]}, which are one tensor in the module"


def _list(verb: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"{verb} {', '.join(names[:_SHOWN])}{more}"
