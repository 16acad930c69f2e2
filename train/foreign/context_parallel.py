"""Context parallelism of a model of `transformers`: each rank of a group runs it on some positions of the same batch.

The model's attention is replaced while the engine runs it, through transformers' AttentionInterface, and is as before
between the calls. What a pass needs travels with it as a keyword, so that a layer that is computed again in backward
finds its own batch's. No mask is made: an implementation without a mask function of its own gets none.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn

from ...core.errors import ConfigError
from ...core.labels import IGNORED
from ...model.attention import Attend
from ...parallel.collectives import all_reduce
from ...parallel.functions import conjugate
from ...parallel.mesh import Group
from ..context.dealing import Dealing, Integers, deal
from ..context.fetched_keys import fetched_shares
from ..context.gather import GatheredAttention
from ..context.modes import Mode, choose_mode
from ..context.ulysses import UlyssesAttention
from .context_batch import WholeBatch, check_same
from .context_model import ModelAttention

IMPLEMENTATION: Final = "tk_context_parallel"
# Keywords that models hand on to attention, which change nothing of what it computes here.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "position_ids", "shift_labels", "num_items_in_batch", "use_cache", "output_attentions", "output_hidden_states",
        "return_dict", "output_router_logits", "is_causal", "logits_to_keep",
    }
)  # fmt: skip


@dataclass
class _AttendedLayer:
    """The layer that calls an `Attend`."""

    layer: int
    window: int | None


@dataclass
class RowsOfPass:
    """The rows that one pass computes some positions of.

    Attributes:
        dealing: the positions of each rank.
        mode: how attention gets the keys of other ranks.
        group: the ranks that share the rows.
        windows: the attention window that the config gives each layer.
        seen: the layers that called for attention.
    """

    dealing: Dealing
    mode: Mode
    group: Group
    windows: tuple[int | None, ...]
    seen: set[int] = field(default_factory=set)
    _attends: dict[float | None, Attend] = field(default_factory=dict)

    def attend(self, scale: float | None) -> Attend:
        """Returns the attention over the rows' keys, with a factor of scores."""
        if scale not in self._attends:
            kind = GatheredAttention if self.mode == "gather" else UlyssesAttention
            self._attends[scale] = kind(self.dealing, self.group, scale)
        return self._attends[scale]


def attend_over_ranks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    tk_rows: RowsOfPass | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention as an implementation of transformers' AttentionInterface.

    Args:
        module: the attention module.
        query: [B, H, L, E], of this rank's positions, rotated.
        key: [B, K, L, E].
        value: [B, K, L, E].
        attention_mask: None.
        scaling: the factor of scores; None for 1 / sqrt(E).
        sliding_window: the layer's window, the query's own position included; None for no window.
        tk_rows: the pass that the call is part of.
        others: a dropout of 0, and keywords without effect on attention.

    Returns:
        The outputs [B, L, H, E], and no weights.

    Raises:
        ConfigError: the module wants something that attention over ranks does not compute.
    """
    layer = getattr(module, "layer_idx", None)
    problem = ""
    if tk_rows is None or not isinstance(layer, int):
        problem = "does not hand on the keywords of its model's forward, or has no layer_idx"
    elif attention_mask is not None or others.get("is_causal") is False:
        problem = "makes a mask of its own"
    elif others.pop("dropout", 0.0):
        problem = "has dropout"
    elif key.shape[-1] != value.shape[-1] or key.shape[2] != query.shape[2]:
        problem = f"has keys {list(key.shape)} and values {list(value.shape)} for queries {list(query.shape)}"
    elif layer >= len(tk_rows.windows) or tk_rows.windows[layer] != sliding_window:
        problem = f"has the window {sliding_window} in layer {layer}, of which its config says otherwise"
    elif wanted := sorted(name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None):
        problem = f"asks for {', '.join(wanted)}"
    if problem:
        raise ConfigError(f"Attention over cp ranks cannot replace {type(module).__name__}: it {problem}. Use cp = 1.")
    assert tk_rows is not None
    assert isinstance(layer, int)
    tk_rows.seen.add(layer)
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    return tk_rows.attend(scaling)(_AttendedLayer(layer, sliding_window), q, k, v), None


class ContextParallel:
    """Runs a model on a rank's positions.

    Args:
        model: the module that the engine trains.
        attention: what `ModelAttention.of` returned.
        wanted: the argument cp_mode.
        group: the ranks that share rows.
        device: the device that the model is on.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: ModelAttention,
        wanted: Mode | Literal["auto"],
        group: Group,
        device: torch.device,
    ) -> None:
        self._model, self._attention, self._wanted, self._group = model, attention, wanted, group
        self._device = device
        configs = {id(config): config for each in model.modules() if (config := getattr(each, "config", None))}
        self._configs: list[Any] = [each for each in configs.values() if hasattr(each, "_attn_implementation")]

    @contextmanager
    def replaced_attention(self) -> Iterator[None]:
        """Surrounds what calls the model's layers, forward or again in backward."""
        transformers: Any = sys.modules["transformers"]
        # a function without state, under a name of ours
        transformers.AttentionInterface.register(IMPLEMENTATION, attend_over_ranks)
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation = IMPLEMENTATION
            yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation

    def run(self, batch: object) -> torch.Tensor:
        """Returns the mean loss over all targets of a batch that every rank of the group has.

        Backward of each rank's loss gives it `group.size` times its positions' part of the gradient, so that the mean
        over ranks is that of the batch, whatever a script computes with the loss.

        Raises:
            ConfigError: the batch cannot be cut, or differs between the ranks.
        """
        check_same(batch, self._group)
        whole = WholeBatch.of(batch)
        rows = self._deal(whole)
        inputs, targets, positions = (
            self._part(rows.dealing, values, padding)
            for values, padding in ((whole.inputs, 0), (whole.targets, IGNORED), (whole.positions, 0))
        )
        with self.replaced_attention():
            output = self._model(
                input_ids=inputs,
                position_ids=positions,
                labels=torch.full_like(targets, IGNORED),  # for which a loss without shift_labels is no number
                shift_labels=targets,
                num_items_in_batch=torch.tensor(whole.num_valid, device=self._device),
                use_cache=False,
                tk_rows=rows,
            )
        self._check_layers(rows)
        size = self._group.size
        return conjugate(output["loss"], partial(_summed, group=self._group), lambda grad: grad * size)

    def _deal(self, whole: WholeBatch) -> RowsOfPass:
        """Deals the positions of a batch; the mode depends on the rows' length."""
        windows, heads = self._attention.windows, self._attention.heads
        num_rows, length = whole.inputs.shape
        shares = fetched_shares(length, windows, heads.cp)
        mode = choose_mode(self._wanted, heads, "none", sum(shares[window] for window in windows) / len(windows))
        return RowsOfPass(deal(num_rows, length, whole.documents, windows, heads.cp), mode, self._group, windows)

    def _part(self, dealing: Dealing, values: Integers, padding: int) -> torch.Tensor:
        return torch.from_numpy(dealing.take(self._group.rank, values, padding)).to(self._device)

    def _check_layers(self, rows: RowsOfPass) -> None:
        missing = sorted(set(range(len(rows.windows))) - rows.seen)
        if missing:
            raise ConfigError(
                f"Layers {missing} of {type(self._model).__name__} computed no attention over cp ranks, so that they "
                "saw one rank's positions only: they skipped it, or do it in a way of their own. Use cp = 1."
            )


def _summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    return all_reduce(x.clone(), group)
