"""Mistral (arXiv 2310.06825): Llama with a sliding window of keys."""

from ..llama_family import OPTIONS, REQUIRES, Family
from ..spec import Architecture

ARCHITECTURE = Architecture(
    name="mistral",
    hugging_face_class="MistralForCausalLM",
    options=OPTIONS | {"sliding_window"},
    decoder=Family().decoder,
    requires=REQUIRES,
    defaults={"sliding_window": 4096},
)
