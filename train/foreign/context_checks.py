"""The checks of a module and of its batches before context-parallel ranks share rows of `initialize`.

Whatever would mix positions of a row in another way than by attention through transformers' interface is refused.
"""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any, Final, Literal

import torch
from torch import nn

from ...core.errors import ConfigError
from ..context.modes import AttentionHeads, Mode, choose_mode

_KINDS: Final = ("full_attention", "sliding_attention")
_DROPOUTS: Final = ("attention_dropout", "attn_pdrop")
# Keys of a model's config with the reason why its rows cannot be shared, for values other than None, 0 and False.
_REFUSED: Final = {
    "is_encoder_decoder": "it is an encoder and a decoder",
    "attention_chunk_size": "its attention is chunked",
    "attn_logit_softcapping": "its attention caps scores, which the kernels of tiles do not",
    "output_router_logits": "its loss balances experts, and each rank would balance those of its own positions",
    "sub_configs": "it has parts with configurations of their own",
}
_TENSORS: Final = frozenset({"input_ids", "labels", "position_ids", "attention_mask"})


def check_context(model: nn.Module, cp: int, mode: Mode | Literal["auto"]) -> None:
    """Checks that cp ranks may share the rows of a module.

    Raises:
        ConfigError: they may not; the message names the cause.
        ParallelError: they cannot in this mode.
    """
    if problem := _problem(model):
        raise ConfigError(
            f"initialize cannot share the rows of this {type(model).__name__} over cp ranks: {problem}. Use cp = 1, or "
            "a decoder of transformers with plain causal attention."
        )
    context_mode(model, cp, mode)


def context_mode(model: nn.Module, cp: int, wanted: Mode | Literal["auto"]) -> Mode:
    """Returns how attention gets the keys of other ranks; raises ParallelError where Ulysses is wanted and cannot."""
    config: Any = model.config
    queries = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or queries)
    return choose_mode(wanted, AttentionHeads(queries, keys, cp), "none")


def _problem(model: nn.Module) -> str:
    config: Any = getattr(model, "config", None)
    if not getattr(model, "_supports_attention_backend", False) or config is None:
        return "it is no model of transformers whose attention goes through its AttentionInterface"
    for key, reason in _REFUSED.items():
        if getattr(config, key, None):
            return f"{reason} ({key})"
    for key in _DROPOUTS:
        if share := getattr(config, key, None):
            return f"it drops attention weights ({key} = {share}); set that to 0"
    others = sorted(set(getattr(config, "layer_types", None) or ()).difference(_KINDS))
    if others:
        return f"it has layers of {others[0]}, and only {' and '.join(_KINDS)} can be shared"
    parameters = signature(model.forward).parameters
    if missing := [name for name in ("input_ids", "position_ids") if name not in parameters]:
        return f"its forward takes no {missing[0]}"
    if all(parameter.kind is not Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return "its forward hands no keywords on to attention"
    return ""


def batch_tensors(batch: object) -> dict[str, torch.Tensor]:
    """Returns the tensors of a batch, all [rows, positions]; `labels` is among them.

    Raises:
        ConfigError: the batch is no mapping, or has something else in it.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"With cp > 1 a batch is a mapping with input_ids and labels; engine(batch) got a {type(batch).__name__}."
        )
    found = {name: value for name, value in batch.items() if value is not None and value is not False}
    if others := sorted(map(str, found.keys() - _TENSORS)):
        raise ConfigError(
            f"engine(batch) got {others[0]}, which cannot be dealt to cp ranks; a batch has some of "
            f"{', '.join(sorted(_TENSORS))}."
        )
    ids, labels = found.get("input_ids"), found.get("labels")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not isinstance(labels, torch.Tensor):
        raise ConfigError("With cp > 1 a batch needs input_ids and labels, both [rows, positions].")
    for name, value in found.items():
        rows = (ids.shape, (1, ids.shape[1])) if name == "position_ids" else (ids.shape,)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) not in rows:
            shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(f"{name} is {shape}, and input_ids are {list(ids.shape)}: both must have the same shape.")
    _check_mask(found.pop("attention_mask", None), labels)
    return found


def _check_mask(mask: torch.Tensor | None, labels: torch.Tensor) -> None:
    """Checks that a mask hides only the ends of rows, which nothing before them sees, and which have no labels."""
    if mask is None:
        return
    seen = mask.bool()
    if bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise ConfigError(
            "attention_mask hides positions before others of their rows. With cp > 1 pad rows on the right "
            '(tokenizer.padding_side = "right"), or pack documents and pass position_ids that begin at 0 in each.'
        )
    if bool((labels[~seen] >= 0).any()):
        raise ConfigError("attention_mask hides positions that have labels; give padding the label -100.")
