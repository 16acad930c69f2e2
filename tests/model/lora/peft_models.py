"""Models of `transformers` with the adapters of tk's options, made by `peft`, and decoders of tk with their values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tk.checkpoint.read.reader import Checkpoint
from tk.model.decoder import Decoder
from tk.model.lora.options import LoraOptions
from tk.model.lora.table import is_factor, with_adapters
from tk.model.registry import decoder_spec
from tk.model.spec import DecoderSpec
from tk.model.stored_config import stored_config
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.tests.model.decoders import config_of

_KEYS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}
_KEYS |= {"exclude": "exclude_modules", "rslora": "use_rslora", "bias": "bias"}
_KEYS |= {key: key for key in ("rank_pattern", "alpha_pattern", "modules_to_save")}


def wrapped(model: PreTrainedModel, options: LoraOptions) -> Any:
    """Returns the model with the adapters of some options, as `peft` makes them, with random B."""
    from peft import LoraConfig, get_peft_model

    given = {_KEYS[key]: value for key, value in options.model_dump(exclude_unset=True).items()}
    given |= {"r": options.rank, "lora_alpha": options.alpha, "target_modules": options.targets}
    config = LoraConfig(**given, init_lora_weights=False)
    config.fan_in_fan_out = model.config.model_type == "gpt2"
    torch.manual_seed(1)
    return get_peft_model(model, config)


def parameters_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters of a wrapped model by the names that they have in tk."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".original_module." not in name:
            for part in (".default", ".base_layer", ".modules_to_save"):
                name = name.replace(part, "")
            found[name.removeprefix("base_model.model.")] = parameter
    return found


def adapted_spec(name: str, random: bool = True, **options: Any) -> DecoderSpec:
    """Returns the decoder of an entry with adapters, whose factors are all random if `random`."""
    spec = with_adapters(decoder_spec(config_of(name)), LoraOptions(**options))
    table = (replace(tensor, init="uniform") if random and is_factor(tensor) else tensor for tensor in spec.table)
    return replace(spec, table=tuple(table))


def adapted_decoder(folder: Path, options: LoraOptions, factors: dict[str, torch.Tensor]) -> Decoder:
    """Returns the decoder of a checkpoint with adapters, whose factors have given values."""
    checkpoint = Checkpoint.open(folder)
    config = stored_config(checkpoint)
    spec = with_adapters(decoder_spec(config), options)
    decoder = Decoder(config, LayerContext(ALONE, torch.float32, torch.device("cpu")), spec=spec)
    for local in decoder.local_params():
        parameter = decoder.get_parameter(local.name).requires_grad_(local.trainable)
        for piece in local.pieces:
            tensor = piece.tensor
            values = factors[tensor.name] if is_factor(tensor) else checkpoint.read(tensor.alias or tensor.name).torch()
            parameter.data.view(-1)[piece.start : piece.start + piece.box.size] = values.detach().reshape(-1)
    return decoder
