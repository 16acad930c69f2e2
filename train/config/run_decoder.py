"""The decoder that a run trains: its model's, as `[lora]` and `[train] freeze` change it (no torch)."""

from dataclasses import replace

from ...model.config import ModelConfig
from ...model.lora.coded import check_coded
from ...model.lora.table import with_adapters
from ...model.registry import decoder_spec
from ...model.spec import DecoderSpec
from .freezing import without_frozen
from .train_config import TrainConfig


def run_decoder(config: TrainConfig, model: ModelConfig) -> DecoderSpec:
    """Returns the decoder that a run trains: with its adapters, and with the tensors marked that are not trained.

    Raises:
        ConfigError: [lora] or [train] freeze does not fit the model.
    """
    spec = decoder_spec(model)
    if config.lora is not None:
        spec = replace(with_adapters(spec, config.lora), base_bits=config.lora.base_bits)
        if spec.base_bits:
            check_coded(spec, config.lora.base)
    return replace(spec, table=without_frozen(spec.table, config.train.freeze))
