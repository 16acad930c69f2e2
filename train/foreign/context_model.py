"""What context parallelism needs of a model of `transformers`: causal attention of known windows and heads, and a loss
of next tokens. Whatever else looks at other positions, or at a whole row, would be wrong on a part of the row.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ...core.errors import ConfigError
from ..context.modes import AttentionHeads, Mode, choose_mode

_DROPOUTS: Final = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_LAYERS: Final = ("full_attention", "sliding_attention")
_OWN_FREQUENCIES: Final = ("dynamic", "longrope")  # chosen by the largest position that the forward pass sees
_MIXERS: Final = (_ConvNd, nn.RNNBase, _NormBase)


@dataclass(frozen=True, slots=True)
class ModelAttention:
    """The attention of a model.

    Attributes:
        windows: the attention window of each layer, the query's own position included; None for no window.
        heads: its heads, with the number of context-parallel ranks.
    """

    windows: tuple[int | None, ...]
    heads: AttentionHeads

    @staticmethod
    def of(model: nn.Module, cp: int, mode: Mode | Literal["auto"] = "auto") -> "ModelAttention":
        """Describes a model; changes nothing.

        Raises:
            ConfigError: ranks that have some positions each could not train it; the message names the cause.
            ParallelError: the mode cannot split its heads.
        """
        problem = next(_problems(model), None)
        if problem:
            raise ConfigError(f"initialize(..., cp={cp}) cannot take this {type(model).__name__}: {problem}")
        config: Any = model.config
        queries = config.num_attention_heads
        keys = getattr(config, "num_key_value_heads", None) or queries
        heads = AttentionHeads(queries, keys, cp)
        choose_mode(mode, heads, "none")
        return ModelAttention(_windows(config), heads)


def _windows(config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return tuple([window] * config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _problems(model: nn.Module) -> Iterator[str]:
    """Yields every problem; later checks rely on earlier ones."""
    if not _is_of_transformers(model):
        yield (
            "context parallelism replaces the attention of models of transformers (a PreTrainedModel such as "
            "LlamaForCausalLM); other modules train with cp = 1, tk's own decoders with [parallel] cp."
        )
    if not getattr(model, "_supports_attention_backend", False):
        yield (
            "its attention is not called through transformers' AttentionInterface (_supports_attention_backend is "
            "False), so that it cannot be replaced. Train it with cp = 1."
        )
    config: Any = model.config
    yield from _of_structure(model, config)
    yield from _of_attention(model, config)
    yield from _of_loss(model, config)


def _is_of_transformers(model: nn.Module) -> bool:
    transformers: Any = sys.modules.get("transformers")  # imported if there is a model of it; tk does not need it
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _of_structure(model: nn.Module, config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder, and cp deals the positions of one causal sequence. Train it with cp = 1."
    if getattr(config, "sub_configs", None):
        yield (
            f"its config has parts of its own ({', '.join(config.sub_configs)}): cp takes models of text alone. Give "
            "the language model inside, or train with cp = 1."
        )
    for name in ("num_attention_heads", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            yield f"its config has no {name}, one number for all layers. Train it with cp = 1."
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        yield "its forward takes no position_ids, so that a rank could not say which positions it has. Use cp = 1."
    kinds = {
        kind
        for key in ("layer_types", "layers_block_type", "block_types", "attention_types")
        for kind in getattr(config, key, None) or ()
        if kind not in _LAYERS
    }
    if kinds:
        yield (
            f"it has layers of the kinds {', '.join(sorted(map(str, kinds)))}; those that cp computes are "
            f"{' and '.join(_LAYERS)}. State-space and linear layers need whole rows: use cp = 1."
        )
    for name, module in model.named_modules():
        if isinstance(module, _MIXERS):
            yield f"{name} ({type(module).__name__}) looks at several positions, of which a rank has some. Use cp = 1."


def _of_attention(model: nn.Module, config: Any) -> Iterator[str]:
    for name in _DROPOUTS:
        if getattr(config, name, None):
            yield (
                f"its config has {name} = {getattr(config, name)}, and attention over ranks has no dropout. Set "
                f"{name} = 0 before you build the model."
            )
    if getattr(config, "attn_logit_softcapping", None):
        yield (
            f"its attention caps scores (attn_logit_softcapping = {config.attn_logit_softcapping}), which attention "
            "over ranks does not. Use cp = 1."
        )
    if getattr(config, "attention_chunk_size", None):
        yield f"its attention is chunked (attention_chunk_size = {config.attention_chunk_size}). Use cp = 1."
    if getattr(config, "kv_lora_rank", None):
        yield "its attention has latent keys (kv_lora_rank), whose values have another size. Use cp = 1."
    if getattr(config, "alibi", False):
        yield "its attention adds ALiBi biases to scores, which attention over ranks does not. Use cp = 1."
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] == "sinks":
            yield f"its attention has sinks ({name} {list(parameter.shape)}), which cp does not compute. Use cp = 1."
    for name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            yield f"{name} is not causal (is_causal = False): cp computes causal attention. Use cp = 1."
    tables = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    for kind in dict.fromkeys(kind for table in tables for kind in _rope_types(table)):
        if kind in _OWN_FREQUENCIES:
            yield (
                f"its rotary embedding is of type {kind!r}, whose frequencies depend on the whole row's length, of "
                "which a rank sees a part. Use cp = 1, or another rope_type."
            )


def _rope_types(parameters: object) -> Iterator[str]:
    """Yields the types in a config's rotary parameters: one table, or one for each kind of layer.

    transformers 4 has them as `rope_scaling`, with the type as "type" in older configs.
    """
    for key, value in parameters.items() if isinstance(parameters, Mapping) else ():
        if key in ("rope_type", "type"):
            yield str(value)
        yield from _rope_types(value)


def _of_loss(model: Any, config: Any) -> Iterator[str]:
    parameters = inspect.signature(model.forward).parameters
    name = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if "labels" not in parameters or name != "ForCausalLMLoss":
        found = f"its loss_function is {name}" if "labels" in parameters else "its forward takes no labels"
        yield f"cp cuts targets for transformers' ForCausalLMLoss, as of AutoModelForCausalLM, and {found}. Use cp = 1."
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        yield "its forward takes no further keywords (**kwargs), with which cp reaches attention and loss. Use cp = 1."
    if getattr(config, "output_router_logits", False):
        yield (
            "output_router_logits = True adds a loss of the router that is no sum over positions, so that ranks "
            "could not add theirs. Set output_router_logits = False, or use cp = 1."
        )
