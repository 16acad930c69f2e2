"""The keys of config.json for mixtures of experts: which layers have one, and Qwen's spellings and sizes."""

from types import MappingProxyType
from typing import Final

from .shape import ModelShape
from .spec import DenseSpec, ExpertsSpec, LayerSpec

EXPERT_OPTIONS: Final = frozenset({"num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"})
EXPERT_KEYS: Final = MappingProxyType({"num_local_experts": ("num_local_experts", "num_experts")})
SPARSE_OPTIONS: Final = frozenset({"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"})


def sparse_layers(config: ModelShape, windows: list[int | None], shared: DenseSpec | None = None) -> list[LayerSpec]:
    """Returns Qwen's layers: experts in every `decoder_sparse_step`-th one, dense ones in `mlp_only_layers` and others.

    Args:
        config: the shape of the model.
        windows: the window of each layer.
        shared: the shared expert beside those that the router chooses; None without one.
    """
    experts = ExpertsSpec(
        config.moe_intermediate_size,
        config.num_local_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        shared,
    )
    dense = DenseSpec(config.intermediate_size)
    return [LayerSpec(experts if _is_sparse(config, layer) else dense, window) for layer, window in enumerate(windows)]


def _is_sparse(config: ModelShape, layer: int) -> bool:
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
