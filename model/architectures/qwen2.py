"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases of q, k and v."""

from ..llama_family import OPTIONS, REQUIRES, WINDOW_OPTIONS, Family, read_windows, windows, write_windows
from ..shape import ModelShape
from ..spec import Architecture, DecoderSpec, DenseSpec, LayerSpec


def _decoder(config: ModelShape) -> DecoderSpec:
    dense = DenseSpec(config.intermediate_size)
    return Family(qkv_bias=True).decoder(config, [LayerSpec(dense, window) for window in windows(config)])


ARCHITECTURE = Architecture(
    name="qwen2",
    hugging_face_class="Qwen2ForCausalLM",
    options=OPTIONS | WINDOW_OPTIONS,
    decoder=_decoder,
    requires=REQUIRES,
    defaults={"max_window_layers": 28},
    read=read_windows,
    write=write_windows,
)
