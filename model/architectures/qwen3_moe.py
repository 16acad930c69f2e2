"""Qwen3 with mixtures of experts (arXiv 2505.09388), in which some layers may be dense."""

from ..expert_keys import EXPERT_KEYS, EXPERT_OPTIONS, SPARSE_OPTIONS, sparse_layers
from ..llama_family import CHANGE_NOTHING, NULLABLE, OPTIONS, QWEN_DEFAULTS, REQUIRES, Family
from ..shape import ModelShape
from ..spec import Architecture, DecoderSpec
from ..window_keys import write_switch


def _decoder(config: ModelShape) -> DecoderSpec:
    windows = [config.sliding_window] * config.num_hidden_layers
    return Family(head_norms=True).decoder(config, sparse_layers(config, windows))


_DEFAULTS = {
    **QWEN_DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "router_aux_loss_coef": 0.001,
}
_ALL_LAYERS_ALIKE = {"max_window_layers", "layer_types"}  # keys of the dense Qwen3 that this one lacks

ARCHITECTURE = Architecture(
    name="qwen3_moe",
    hugging_face_class="Qwen3MoeForCausalLM",
    options=OPTIONS | EXPERT_OPTIONS | SPARSE_OPTIONS | {"sliding_window"},
    decoder=_decoder,
    requires=REQUIRES | {"attention_bias": False},
    defaults={key: value for key, value in _DEFAULTS.items() if key not in _ALL_LAYERS_ALIKE},
    nullable=NULLABLE - {"head_dim", "num_key_value_heads"} | {"mlp_only_layers"},
    ignored=CHANGE_NOTHING | {"output_router_logits", "max_window_layers"},
    keys=EXPERT_KEYS,
    write=write_switch,
)
