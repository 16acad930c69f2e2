"""Qwen3 (arXiv 2505.09388): Llama with an RMSNorm of every query and key head."""

from ..llama_family import CHANGE_NOTHING, NULLABLE, OPTIONS, QWEN_DEFAULTS, REQUIRES, WINDOW_OPTIONS, Family
from ..spec import Architecture
from ..window_keys import write_switch

ARCHITECTURE = Architecture(
    name="qwen3",
    hugging_face_class="Qwen3ForCausalLM",
    options=OPTIONS | WINDOW_OPTIONS,
    decoder=Family(head_norms=True).decoder,
    requires=REQUIRES | {"attention_bias": False},
    defaults={**QWEN_DEFAULTS, "head_dim": 128},
    nullable=NULLABLE - {"head_dim"},
    ignored=CHANGE_NOTHING,
    write=write_switch,
)
