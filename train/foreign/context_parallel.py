"""Context parallelism for modules of transformers: ranks share rows, and attention goes through its interface.

Every rank of a group gets the same batch. Labels are shifted in the whole rows, then each rank takes the positions that
are dealt to it, and its attention gets the keys of the others (train/context). The loss is the mean over all labels of
the batch, whatever ranks they are on (transformers #46775 counts them once per rank).
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.labels import IGNORED
from ...parallel.collectives import all_reduce, gather_bytes
from ...parallel.functions import conjugate
from ...parallel.mesh import Group
from ..context.dealing import Dealing, deal
from ..context.gather import GatheredAttention
from ..context.modes import Mode
from ..context.ulysses import UlyssesAttention
from .context_checks import batch_tensors, context_mode

_OTHER_OPTIONS: Final = ("softcap", "s_aux", "position_bias")  # of layers of transformers, which tiles do not have
IMPLEMENTATION: Final = "tk_context_parallel"  # the name of our attention in transformers' interface


@dataclass(slots=True)
class _CalledLayer:
    """An attention layer of transformers, as an `Attend` wants it."""

    layer: int
    window: int | None


class SharedRows:
    """The attention of one batch's rows, which travels through a module's keywords to each of its layers.

    Args:
        dealing: the positions of each rank.
        group: the ranks that share the rows.
        mode: how attention gets the keys of other ranks.
    """

    def __init__(self, dealing: Dealing, group: Group, mode: Mode) -> None:
        self.dealing, self._group, self._mode = dealing, group, mode
        self._attends: dict[float | None, GatheredAttention | UlyssesAttention] = {}

    def attend(
        self, at: _CalledLayer, scale: float | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Returns the outputs [B, L, H, E] of queries [B, L, H, E] over keys and values [B, L, K, E] of all ranks."""
        if scale not in self._attends:
            kind = GatheredAttention if self._mode == "gather" else UlyssesAttention
            self._attends[scale] = kind(self.dealing, self._group, scale)
        return self._attends[scale](at, q, k, v)


def shared_attention(
    module: nn.Module,
    q_BHLE: torch.Tensor,
    k_BKLE: torch.Tensor,
    v_BKLE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention as transformers' interface wants it: returns [B, L, H, E], and no weights.

    Raises:
        ConfigError: the layer wants something that would be left out.
    """
    rows: SharedRows | None = options.get("shared_rows")
    wanted = "dropout" if options.get("dropout") else "a mask" if attention_mask is not None else ""
    wanted = next((name for name in _OTHER_OPTIONS if options.get(name) is not None), wanted)
    if rows is None or wanted or not getattr(module, "is_causal", True):
        raise ConfigError(
            f"{type(module).__name__} wants {wanted or 'other rows'} in its attention, which cp > 1 does not have: it "
            "is causal, over the rows of the batch that engine(batch) got."
        )
    at = _CalledLayer(int(getattr(module, "layer_idx", 0)), options.get("sliding_window"))
    q, k, v = (each.transpose(1, 2) for each in (q_BHLE, k_BKLE, v_BKLE))
    return rows.attend(at, options.get("scaling"), q, k, v), None


class ContextParallel:
    """A module whose rows the ranks of a group share.

    Args:
        model: the module, which `check_context` accepts.
        group: the ranks that share rows, more than one.
        mode: "gather", "ulysses", or "auto" for the one that moves fewer bytes.

    Raises:
        ParallelError: Ulysses is wanted, but the number of heads is no multiple of the ranks.
    """

    def __init__(self, model: nn.Module, group: Group, mode: Mode | Literal["auto"]) -> None:
        config: Any = model.config
        self._mode = context_mode(model, group.size, mode)
        self._model, self._group, self._config = model, group, config
        self._windows = _windows(config)
        self._last: tuple[object, SharedRows] | None = None
        # tk does not depend on transformers; the model is one of it, so it is loaded.
        sys.modules["transformers"].AttentionInterface.register(IMPLEMENTATION, shared_attention)

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Lets the module attend over shared rows inside of the block; backward may compute layers again there."""
        before = self._config._attn_implementation
        self._config._attn_implementation = IMPLEMENTATION
        try:
            yield
        finally:
            self._config._attn_implementation = before

    def loss(self, batch: object) -> torch.Tensor:
        """Runs the module on this rank's positions; returns the mean loss over all labels of the batch.

        Raises:
            ConfigError: the batch cannot be shared, or the ranks of the group got different ones.
        """
        tensors = batch_tensors(batch)
        ids, labels = tensors["input_ids"], tensors["labels"]
        self._check_alike(tensors)
        places = tensors.get("position_ids")
        positions = torch.arange(ids.shape[1], device=ids.device) if places is None else places
        positions = positions.expand(ids.shape)
        rows = self._rows(positions if places is not None else None, ids.shape)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        count = max(1, int((targets != IGNORED).sum()))
        inputs, position_ids, own = (
            self._own(rows.dealing, *each) for each in ((ids, 0), (positions, 0), (targets, IGNORED))
        )
        with self.attending():
            output = self._model(input_ids=inputs, position_ids=position_ids, use_cache=False, shared_rows=rows)
        logits = output.logits.float().flatten(0, 1)
        total = F.cross_entropy(logits, own.flatten(), ignore_index=IGNORED, reduction="sum")
        # Gradients are averaged over all ranks, those that share rows included, though they are parts of one sum.
        return conjugate(total * (self._group.size / count), partial(_mean, group=self._group), torch.clone)

    def _own(self, dealing: Dealing, values: torch.Tensor, padding: int) -> torch.Tensor:
        taken = dealing.take(self._group.rank, values.cpu().numpy().astype(np.int64), padding)
        return torch.from_numpy(np.ascontiguousarray(taken)).to(values.device)

    def _rows(self, positions: torch.Tensor | None, shape: torch.Size) -> SharedRows:
        """Returns the deal of rows: that of the last batch if the rows are cut alike."""
        documents = () if positions is None else _documents(positions)
        if self._last is None or self._last[0] != (shape, documents):
            dealing = deal(shape[0], shape[1], documents, self._windows, self._group.size)
            self._last = ((shape, documents), SharedRows(dealing, self._group, self._mode))
        return self._last[1]

    def _check_alike(self, tensors: dict[str, torch.Tensor]) -> None:
        """Compares the batch of all ranks of the group: one that had other rows would train on a mixture of both."""
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(f"{name} {list(tensors[name].shape)}".encode())
            digest.update(tensors[name].cpu().numpy().tobytes())
        if len(set(gather_bytes(digest.digest(), self._group))) > 1:
            raise ConfigError(
                f"The {self._group.size} ranks that share rows got different batches. Ranks 0 to cp - 1 get the same "
                "batch, the next cp ranks another: take the rows of number RANK // cp of WORLD_SIZE // cp parts."
            )


def _mean(share: torch.Tensor, group: Group) -> torch.Tensor:
    return all_reduce(share.clone(), group) / group.size


def _windows(config: Any) -> list[int | None]:
    """Returns the window of each layer, by which positions are dealt; each layer's call says what it attends to."""
    window, num_layers = getattr(config, "sliding_window", None) or None, int(config.num_hidden_layers)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _documents(positions: torch.Tensor) -> tuple[int, ...]:
    """Returns the lengths of the documents of rows, one after another: each begins where positions do not go on by 1.

    () stands for rows of one document each.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=1) != 1
    if int(begins.sum()) == len(positions):
        return ()
    starts = [*begins.flatten().nonzero().flatten().tolist(), positions.numel()]
    return tuple(stop - start for start, stop in pairwise(starts))
