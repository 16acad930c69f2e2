"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of q, k and v."""

from ..llama_family import CHANGE_NOTHING, NULLABLE, OPTIONS, QWEN_DEFAULTS, REQUIRES, WINDOW_OPTIONS, Family
from ..spec import Architecture
from ..window_keys import write_switch

ARCHITECTURE = Architecture(
    name="qwen2",
    hugging_face_class="Qwen2ForCausalLM",
    options=OPTIONS | WINDOW_OPTIONS,
    decoder=Family(qkv_bias=True).decoder,
    requires=REQUIRES,
    defaults=QWEN_DEFAULTS,
    nullable=NULLABLE - {"head_dim"},
    ignored=CHANGE_NOTHING,
    write=write_switch,
)
