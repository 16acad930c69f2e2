"""A model's configuration: the `[model]` section of a training run and a checkpoint's config.json both end here.

One class holds the options of every architecture; which of them an architecture has, and what its config.json calls
them, its own file says (see `spec.Architecture`). An option that is not its own is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import model_validator

from ..core.config import parse
from ..core.errors import ConfigError, ManifestError
from .registry import architectures
from .shape import ModelShape, RopeScaling
from .spec import Architecture

_SHARED = frozenset(
    {"architecture", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"max_position_embeddings", "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype"}
)  # fields of every architecture; the others belong to those that name them


class ModelConfig(ModelShape):
    """A decoder's shape whose options are those of its architecture."""

    @model_validator(mode="after")
    def _refuse_foreign_options(self) -> "ModelConfig":
        own = _SHARED | _architecture(self.architecture, "architecture").options
        unset = {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
        }
        for name, field in ModelConfig.model_fields.items():
            if name not in own and getattr(self, name) != unset.get(name, field.default):
                raise ValueError(f"{name} = {getattr(self, name)!r} is no option of {self.architecture}")
        return self

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """Reads a Hugging Face config.json, ignoring keys that do not shape the model.

        Raises:
            ManifestError: an architecture or an option that tk does not implement.
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
        """Reads `folder`/config.json. Raises ManifestError if there is none or it is not JSON."""
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ManifestError(f"Cannot read {path}: {error.strerror}.") from error
        except ValueError as error:
            raise ManifestError(f"{path} is not valid JSON: {error}.") from error
        if not isinstance(data, dict):
            raise ManifestError(f"{path} must hold a JSON object.")
        return ModelConfig.from_json(data, str(path))

    def to_json(self) -> dict[str, Any]:
        """The config.json that `transformers` reads."""
        architecture = _architecture(self.architecture, "architecture")
        own = (_SHARED | architecture.options) - {"architecture", "dtype", "rope_scaling"}
        values = self.model_dump(mode="json", include=set(own))
        data = {architecture.keys.get(name, (name,))[0]: value for name, value in values.items()}
        eos = list(self.eos_token_id)
        if "rope_theta" in own:
            scaling = self.rope_scaling.model_dump() if self.rope_scaling else {"rope_type": "default"}
            data["rope_parameters"] = scaling | {"rope_theta": self.rope_theta}
        return {
            **data,
            **architecture.requires,
            **architecture.write(self),
            "architectures": [architecture.hugging_face_class],
            "model_type": architecture.name,
            "torch_dtype": self.dtype,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }


def _architecture(name: object, key: str) -> Architecture:
    known = architectures()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{key} {name!r} is not supported; tk knows {', '.join(known)}")
    return known[name]


def _translate(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's keys as ModelConfig's fields; raises ValueError for what tk does not implement."""
    architecture = _architecture(data.get("model_type"), "model_type")
    for key, value in architecture.requires.items():
        if data.get(key) is not None and data[key] != value:
            raise ValueError(f"{key} = {data[key]!r} is not supported for {architecture.name}, only {value!r} is")
    names = {key: name for name, keys in architecture.keys.items() for key in keys}
    found = {**architecture.absent, **{names.get(key, key): value for key, value in data.items()}}
    found |= _rope(found, architecture)
    found = architecture.read(found)
    own = _SHARED | architecture.options
    known = {key: value for key, value in found.items() if key in own and value is not None}
    return known | {
        "architecture": architecture.name,
        "dtype": data.get("dtype") or data.get("torch_dtype") or "float32",
    }


def _rope(data: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """The two fields of rotary embedding, from the newer `rope_parameters` or the older two keys."""
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters must be an object, not {rope!r}")
    result: dict[str, Any] = {"rope_scaling": None}
    if rope.get("rope_theta") is not None:
        result["rope_theta"] = rope["rope_theta"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3" and "rope_scaling" in architecture.options:
        result["rope_scaling"] = {name: rope[name] for name in RopeScaling.model_fields if name in rope}
    elif kind != "default":
        raise ValueError(f"rope_type = {kind!r} is not supported for {architecture.name}")
    return result
