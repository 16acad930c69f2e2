"""Llama (arXiv 2302.13971) up to Llama 3 (arXiv 2407.21783)."""

from ..llama_family import OPTIONS, REQUIRES, Family
from ..spec import Architecture

ARCHITECTURE = Architecture(
    name="llama",
    hugging_face_class="LlamaForCausalLM",
    options=OPTIONS | {"rope_scaling"},
    decoder=Family().decoder,
    requires=REQUIRES | {"attention_bias": False, "mlp_bias": False},
)
