"""Qwen3 with mixtures of experts (arXiv 2505.09388), in which some layers may be dense."""

from ..llama_family import EXPERT_KEYS, EXPERT_OPTIONS, OPTIONS, REQUIRES, Family, read_windows, write_windows
from ..shape import ModelShape
from ..spec import Architecture, DecoderSpec, DenseSpec, ExpertsSpec, LayerSpec

_OPTIONS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "sliding_window"}
)


def _decoder(config: ModelShape) -> DecoderSpec:
    experts = ExpertsSpec(
        config.moe_intermediate_size, config.num_local_experts, config.num_experts_per_tok, config.norm_topk_prob
    )
    dense = DenseSpec(config.intermediate_size)
    layers = [
        LayerSpec(experts if _is_sparse(config, layer) else dense, config.sliding_window)
        for layer in range(config.num_hidden_layers)
    ]
    return Family(head_norms=True).decoder(config, layers)


def _is_sparse(config: ModelShape, layer: int) -> bool:
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


ARCHITECTURE = Architecture(
    name="qwen3_moe",
    hugging_face_class="Qwen3MoeForCausalLM",
    options=OPTIONS | EXPERT_OPTIONS | _OPTIONS,
    decoder=_decoder,
    requires=REQUIRES | {"attention_bias": False},
    keys=EXPERT_KEYS,
    read=read_windows,
    write=write_windows,
)
