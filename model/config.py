"""A model's configuration, made from the `[model]` section of a training run or read from a checkpoint's config.json.

One class holds the options of all architectures. An architecture's file names those that it has, and their keys in
config.json (see `spec.Architecture`); other options are refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from ..core.config import parse
from ..core.errors import ConfigError, ManifestError
from ..core.given_files import read_given_text
from .config_keys import model_values, refuse_unsupported
from .registry import architectures
from .rope_keys import read_rope, refuse_rope
from .shape import ModelKeys, ModelShape
from .spec import Architecture
from .window_keys import read_windows

_SHARED = frozenset(
    {"architecture", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"max_position_embeddings", "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype"}
)  # the fields that every architecture has


class ModelConfig(ModelShape):
    """A decoder's shape, checked to have no options that its architecture lacks."""

    @model_validator(mode="after")
    def _has_own_options_only(self) -> Self:
        refuse_foreign_options(self)
        return self

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """Parses a Hugging Face config.json; keys that it lacks have the values that `transformers` gives them.

        Args:
            data: the content of config.json.
            where: the file's name, for errors.

        Raises:
            ManifestError: the architecture or an option of it is not supported.
        """
        try:
            known = _translate(data)
            return parse(known, ModelConfig, where)
        except ValueError as error:
            raise ManifestError(f"{where}: {error}.") from error
        except ConfigError as error:
            raise ManifestError(str(error)) from error

    @staticmethod
    def from_folder(folder: Path) -> "ModelConfig":
        """Reads config.json in a folder.

        Raises:
            ManifestError: the file does not exist, is not JSON, or describes a model that is not supported.
        """
        path = folder / "config.json"
        try:
            data = json.loads(read_given_text(path))
        except OSError as error:
            raise ManifestError(f"Cannot read {path}: {error.strerror}.") from error
        except ValueError as error:
            raise ManifestError(f"{path} is not valid JSON: {error}.") from error
        if not isinstance(data, dict):
            raise ManifestError(f"{path} must hold a JSON object, not {type(data).__name__}.")
        return ModelConfig.from_json(data, str(path))

    def to_json(self) -> dict[str, Any]:
        """Returns the content of a config.json that `transformers` can read."""
        architecture = _architecture(self.architecture, "architecture")
        own = (_SHARED | architecture.options) - {"architecture", "dtype", "rope_scaling", "layer_types"}
        values = self.model_dump(mode="json", include=set(own))
        data = {architecture.keys.get(name, (name,))[0]: value for name, value in values.items()}
        eos = list(self.eos_token_id)
        if "rope_theta" in own:
            scaling = self.rope_scaling.model_dump(exclude_none=True) if self.rope_scaling else {"rope_type": "default"}
            data["rope_parameters"] = scaling | {"rope_theta": self.rope_theta}
            if "partial_rotary_factor" in own:
                data["rope_parameters"]["partial_rotary_factor"] = data.pop("partial_rotary_factor")
        if self.layer_types:
            data["layer_types"] = list(self.layer_types)
        return {
            **data,
            **architecture.requires,
            **architecture.write(self),
            "architectures": [architecture.hugging_face_class],
            "model_type": architecture.name,
            "torch_dtype": self.dtype,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }


def refuse_foreign_options(keys: ModelKeys) -> None:
    """Checks that `keys` sets no option that its architecture lacks.

    Raises:
        ValueError: it sets one, or there is no such architecture.
    """
    own = _SHARED | _architecture(keys.architecture, "architecture").options
    unset = {
        "num_key_value_heads": keys.num_attention_heads,
        "head_dim": keys.hidden_size // keys.num_attention_heads,
    }
    for name, field in ModelKeys.model_fields.items():
        if name not in own and getattr(keys, name) != unset.get(name, field.default):
            raise ValueError(f"{name} = {getattr(keys, name)!r} is not an option of {keys.architecture}")


def _architecture(name: object, key: str) -> Architecture:
    known = architectures()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{key} {name!r} is not supported; supported are {', '.join(known)}")
    return known[name]


def _translate(data: Mapping[str, Any]) -> dict[str, Any]:
    """Translates the keys of a config.json into ModelConfig's fields.

    Raises:
        ValueError: the architecture or an option of it is not supported.
    """
    architecture = _architecture(data.get("model_type"), "model_type")
    refuse_unsupported(data, architecture)
    values = model_values(data, architecture)
    if "rope_theta" in architecture.options:
        share = architecture.defaults.get("partial_rotary_factor")
        values |= read_rope(data, architecture.defaults["rope_theta"], values["max_position_embeddings"], share)
    else:
        refuse_rope(data)
    values = architecture.read(values | {"layer_types": data.get("layer_types")})
    values |= read_windows(values, values["layer_types"], per_layer="layer_types" in architecture.options)
    own = _SHARED | architecture.options
    return {key: value for key, value in values.items() if key in own and value is not None} | {
        "architecture": architecture.name,
        "dtype": data.get("dtype") or data.get("torch_dtype") or "float32",
    }
