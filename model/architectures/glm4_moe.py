"""GLM-4.5 (arXiv 2508.06471): experts chosen by sigmoid scores and a bias, as in DeepSeek-V3, after dense layers."""

from collections.abc import Mapping
from typing import Any

from ..expert_keys import EXPERT_OPTIONS
from ..llama_family import CHANGE_NOTHING, DEFAULTS, NULLABLE, OPTIONS, REQUIRES, Family, Names
from ..shape import ModelShape
from ..spec import Architecture, DecoderSpec, DenseSpec, ExpertsSpec, LayerSpec

_OPTIONS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "qkv_bias", "use_qk_norm", "partial_rotary_factor"}
    | {"first_k_dense_replace", "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor"}
)


def _decoder(config: ModelShape) -> DecoderSpec:
    experts = ExpertsSpec(
        config.moe_intermediate_size,
        config.num_local_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        DenseSpec(config.moe_intermediate_size * config.n_shared_experts),
        scoring="sigmoid",
        num_groups=config.n_group,
        top_groups=config.topk_group,
        scale=config.routed_scaling_factor,
    )
    dense = DenseSpec(config.intermediate_size)
    family = Family(
        qkv_bias=config.qkv_bias,
        head_norms=config.use_qk_norm,
        correction_bias=True,
        expert_names=Names(shared="shared_experts"),
    )
    num_dense = config.first_k_dense_replace
    layers = [LayerSpec(dense if layer < num_dense else experts) for layer in range(config.num_hidden_layers)]
    return family.decoder(config, layers)


def _unused(data: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Returns the names of the layers that predict further tokens, which lie behind the others."""
    count = data.get("num_nextn_predict_layers", data.get("num_mtp_layers", 1))
    last = num_layers + (count if isinstance(count, int) else 0)
    return tuple(f"model.layers.{layer}." for layer in range(num_layers, last))


ARCHITECTURE = Architecture(
    name="glm4_moe",
    hugging_face_class="Glm4MoeForCausalLM",
    options=OPTIONS | EXPERT_OPTIONS | _OPTIONS,
    decoder=_decoder,
    requires=REQUIRES,
    defaults={
        **DEFAULTS,
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "router_aux_loss_coef": 0.0,
    },
    nullable=NULLABLE - {"num_key_value_heads", "head_dim"} | {"partial_rotary_factor"},
    ignored=CHANGE_NOTHING | {"output_router_logits", "num_mtp_layers", "num_nextn_predict_layers"},
    keys={"num_local_experts": ("n_routed_experts", "num_local_experts"), "qkv_bias": ("attention_bias",)},
    unused=_unused,
)
