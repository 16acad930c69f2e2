"""The batch of a model of `transformers` under context parallelism: checked, with its targets and its documents."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.errors import ConfigError
from ...core.labels import IGNORED
from ...parallel.collectives import gather_bytes
from ...parallel.mesh import Group
from ..context.dealing import Integers

_TAKEN: Final = ("input_ids", "labels", "position_ids", "attention_mask")
_WHERE: Final = "engine(batch) with cp"


@dataclass(frozen=True)
class WholeBatch:
    """All positions of a batch.

    Attributes:
        inputs: int64 [rows, positions].
        targets: the label of the position after each, or IGNORED; the same shape.
        positions: each input's position id; the same shape.
        documents: the lengths of the documents, row after row; () for rows that are one document each.
    """

    inputs: Integers
    targets: Integers
    positions: Integers
    documents: tuple[int, ...]

    @property
    def num_valid(self) -> int:
        """The number of targets that count."""
        return int(np.count_nonzero(self.targets != IGNORED))

    @staticmethod
    def of(batch: object) -> "WholeBatch":
        """Takes a batch, as `transformers` understands it: without an attention_mask, position_ids that do not go on
        by one begin a document.

        Raises:
            ConfigError: the batch lacks labels, or has something that cannot be dealt to ranks.
        """
        given = _arrays(batch)
        inputs, labels = given["input_ids"], given["labels"]
        if labels.shape != inputs.shape:
            raise ConfigError(
                f"{_WHERE}: labels have shape {list(labels.shape)} and input_ids {list(inputs.shape)}; each token has "
                "a label (-100 where none counts), and the model's loss shifts them."
            )
        if "attention_mask" in given:
            _check_mask(given["attention_mask"], labels)
        positions = _positions(given.get("position_ids"), inputs)
        documents = () if "attention_mask" in given else _documents(positions)
        ends = np.full((len(labels), 1), IGNORED, np.int64)
        return WholeBatch(inputs, np.concatenate((labels[:, 1:], ends), 1), positions, documents)


def check_same(batch: object, group: Group) -> None:
    """Compares the batches of the ranks that share rows; every one of them calls it.

    Raises:
        ConfigError: they differ; raised on every rank.
    """
    digest = hashlib.sha256()
    for name, value in sorted(batch.items()) if isinstance(batch, Mapping) else ():
        digest.update(f"{name} {type(value)} ".encode())
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous()
            digest.update(f"{plain.dtype} {list(plain.shape)} ".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    digests = gather_bytes(digest.digest(), group)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise ConfigError(
                f"{_WHERE} needs the same batch on the {group.size} ranks that share its rows: rank {rank} of them has "
                "another one than rank 0. Deal batches over dp = ranks / cp: with index RANK // cp of a data loader."
            )


def _arrays(batch: object) -> dict[str, Integers]:
    """Returns the tensors of a batch as int64 arrays [rows, positions]."""
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"{_WHERE} takes a mapping with input_ids and labels, so that it knows what to cut; it got a "
            f"{type(batch).__name__}."
        )
    if problem := next(_problems(batch), None):
        raise ConfigError(f"{_WHERE}: {problem}")
    return {name: batch[name].cpu().numpy().astype(np.int64) for name in _TAKEN if batch.get(name) is not None}


def _problems(batch: Mapping[str, object]) -> Iterator[str]:
    for name, value in batch.items():
        if name not in _TAKEN and value is not None and not (name == "use_cache" and value is False):
            yield f"{name} cannot be dealt to ranks; a batch has {', '.join(_TAKEN)}. Take {name} out, or use cp = 1."
    for name in ("input_ids", "labels"):
        if batch.get(name) is None:
            yield f"the batch has no {name}, of which ranks take some positions each."
    for name in _TAKEN:
        value = batch.get(name)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or not value.numel():
            found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            yield f"{name} is {found}; it must be a tensor [rows, positions]."
        elif value.is_floating_point() and name != "attention_mask":
            yield f"{name} is {value.dtype}; it must be of integers."


def _check_mask(mask: Integers, labels: Integers) -> None:
    if mask.shape != labels.shape or not np.isin(mask, (0, 1)).all():
        raise ConfigError(
            f"{_WHERE}: attention_mask has shape {list(mask.shape)}; it must be that of input_ids, "
            f"{list(labels.shape)}, of zeros and ones."
        )
    wrong: NDArray[np.bool_] = mask[:, :-1] < mask[:, 1:]
    if wrong.any():
        raise ConfigError(
            f"{_WHERE}: attention_mask hides tokens before others in row {int(wrong.any(1).argmax())}. Pad rows at "
            'their ends (tokenizer.padding_side = "right").'
        )
    counted = (mask == 0) & (labels != IGNORED)
    if counted.any():
        raise ConfigError(
            f"{_WHERE}: row {int(counted.any(1).argmax())} has labels where attention_mask hides tokens. Set the "
            "labels of padding to -100."
        )


def _positions(given: Integers | None, inputs: Integers) -> Integers:
    if given is None:
        given = np.arange(inputs.shape[1])[None]
    if given.shape[0] not in (1, len(inputs)) or given.shape[1] != inputs.shape[1]:
        raise ConfigError(
            f"{_WHERE}: position_ids have shape {list(given.shape)}; they must have that of input_ids, "
            f"{list(inputs.shape)}, or one row."
        )
    return np.broadcast_to(given, inputs.shape)


def _documents(positions: Integers) -> tuple[int, ...]:
    """Returns the lengths of the documents of all rows; () if each row is one."""
    begins = np.ones(positions.shape, np.bool_)
    begins[:, 1:] = np.diff(positions, axis=1) != 1
    if not begins[:, 1:].any():
        return ()
    starts = np.flatnonzero(begins)
    return tuple(np.diff(starts, append=begins.size).tolist())
