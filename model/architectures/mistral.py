"""Mistral (arXiv 2310.06825): Llama with a sliding window of keys, in all layers or in some of them (Ministral)."""

from ..llama_family import CHANGE_NOTHING, DEFAULTS, NULLABLE, OPTIONS, REQUIRES, Family
from ..spec import Architecture

ARCHITECTURE = Architecture(
    name="mistral",
    hugging_face_class="MistralForCausalLM",
    options=OPTIONS | {"sliding_window", "layer_types"},
    decoder=Family().decoder,
    requires=REQUIRES,
    defaults={**DEFAULTS, "sliding_window": 4096, "layer_types": None},
    nullable=NULLABLE,
    ignored=CHANGE_NOTHING,
)
