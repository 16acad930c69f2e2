"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from ..expert_keys import EXPERT_KEYS, EXPERT_OPTIONS
from ..llama_family import CHANGE_NOTHING, DEFAULTS, NULLABLE, OPTIONS, REQUIRES, Family, Names
from ..shape import ModelShape
from ..spec import Architecture, DecoderSpec, ExpertsSpec, LayerSpec


def _decoder(config: ModelShape) -> DecoderSpec:
    experts = ExpertsSpec(config.intermediate_size, config.num_local_experts, config.num_experts_per_tok, True)
    family = Family(expert_names=Names("block_sparse_moe", "w1", "w3", "w2"))
    return family.decoder(config, [LayerSpec(experts, config.sliding_window)] * config.num_hidden_layers)


ARCHITECTURE = Architecture(
    name="mixtral",
    hugging_face_class="MixtralForCausalLM",
    options=OPTIONS | EXPERT_OPTIONS | {"sliding_window"},
    decoder=_decoder,
    requires=REQUIRES,
    defaults={
        **DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    nullable=NULLABLE,
    ignored=CHANGE_NOTHING | {"output_router_logits", "router_jitter_noise"},
    keys=EXPERT_KEYS,
)
