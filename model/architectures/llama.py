"""Llama (arXiv 2302.13971) up to Llama 3 (arXiv 2407.21783)."""

from ..llama_family import CHANGE_NOTHING, DEFAULTS, NULLABLE, OPTIONS, REQUIRES, Family
from ..spec import Architecture

ARCHITECTURE = Architecture(
    name="llama",
    hugging_face_class="LlamaForCausalLM",
    options=OPTIONS,
    decoder=Family().decoder,
    requires=REQUIRES | {"attention_bias": False, "mlp_bias": False},
    defaults={**DEFAULTS, "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048},
    nullable=NULLABLE,
    ignored=CHANGE_NOTHING | {"pretraining_tp"},
)
