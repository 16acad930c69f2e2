"""Qwen3 (arXiv 2505.09388): Llama with an RMSNorm of every query and key head."""

from ..llama_family import OPTIONS, REQUIRES, WINDOW_OPTIONS, Family, read_windows, windows, write_windows
from ..shape import ModelShape
from ..spec import Architecture, DecoderSpec, DenseSpec, LayerSpec


def _decoder(config: ModelShape) -> DecoderSpec:
    dense = DenseSpec(config.intermediate_size)
    return Family(head_norms=True).decoder(config, [LayerSpec(dense, window) for window in windows(config)])


ARCHITECTURE = Architecture(
    name="qwen3",
    hugging_face_class="Qwen3ForCausalLM",
    options=OPTIONS | WINDOW_OPTIONS,
    decoder=_decoder,
    requires=REQUIRES | {"attention_bias": False},
    defaults={"head_dim": 128, "max_window_layers": 28},
    read=read_windows,
    write=write_windows,
)
