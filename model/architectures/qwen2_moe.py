"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671, section 2.2.2): Qwen2 with experts, and one that every token passes."""

from typing import Any

from ..expert_keys import EXPERT_OPTIONS, SPARSE_OPTIONS, sparse_layers
from ..llama_family import CHANGE_NOTHING, NULLABLE, OPTIONS, QWEN_DEFAULTS, REQUIRES, Family
from ..shape import FULL, SLIDING, ModelShape
from ..spec import Architecture, DecoderSpec, DenseSpec
from ..window_keys import windows, write_switch

_OPTIONS = frozenset({"shared_expert_intermediate_size", "qkv_bias", "sliding_window", "layer_types"})


def _decoder(config: ModelShape) -> DecoderSpec:
    shared = DenseSpec(config.shared_expert_intermediate_size)
    family = Family(qkv_bias=config.qkv_bias, shared_gate=True)
    return family.decoder(config, sparse_layers(config, windows(config), shared))


def _read(values: dict[str, Any]) -> dict[str, Any]:
    """Translates the rule of this architecture alone: of the first `max_window_layers`, every second has the window."""
    num_windowed, num_layers = values["max_window_layers"], values["num_hidden_layers"]
    if not isinstance(num_windowed, int) or not isinstance(num_layers, int):
        return values  # which is refused
    types = values["layer_types"]
    if types is None and values["use_sliding_window"] is True:
        types = [SLIDING if layer % 2 == 0 and layer < num_windowed else FULL for layer in range(num_layers)]
    return values | {"max_window_layers": 0, "layer_types": types}


def _write(config: ModelShape) -> dict[str, Any]:
    types = [FULL if window is None else SLIDING for window in windows(config)]
    return write_switch(config) | {"layer_types": types}


ARCHITECTURE = Architecture(
    name="qwen2_moe",
    hugging_face_class="Qwen2MoeForCausalLM",
    options=OPTIONS | EXPERT_OPTIONS | SPARSE_OPTIONS | _OPTIONS,
    decoder=_decoder,
    requires=REQUIRES,
    defaults={
        **QWEN_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "router_aux_loss_coef": 0.001,
        "qkv_bias": True,
    },
    nullable=NULLABLE - {"head_dim"} | {"mlp_only_layers"},
    ignored=CHANGE_NOTHING | {"output_router_logits"},
    keys={"num_local_experts": ("num_experts",)},
    read=_read,
    write=_write,
)
