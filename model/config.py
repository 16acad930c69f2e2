"""A model's shape, with the key names of Hugging Face's config.json, in both of their spellings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ..core.config import Section, parse
from ..core.errors import ManifestError

_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ARCHITECTURE_CLASSES = {"llama": "LlamaForCausalLM"}


class ModelConfig(Section):
    """Shape of a decoder. The `[model]` section of a training config and a checkpoint's config.json both end here.

    Attributes:
        head_dim: 0 = hidden_size / num_attention_heads.
        num_key_value_heads: 0 = num_attention_heads.
        eos_token_id: ids that end a text.
        dtype: of the stored weights, as config.json spells it.
    """

    architecture: Literal["llama"] = "llama"
    vocab_size: int = Field(default=0, ge=0)
    hidden_size: int = Field(default=256, ge=1)
    intermediate_size: int = Field(default=688, ge=1)
    num_hidden_layers: int = Field(default=4, ge=1)
    num_attention_heads: int = Field(default=4, ge=1)
    num_key_value_heads: int = Field(default=0, ge=0)
    head_dim: int = Field(default=0, ge=0)
    max_position_embeddings: int = Field(default=2048, ge=1)
    rope_theta: float = Field(default=10000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    initializer_range: float = Field(default=0.02, gt=0)
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = dict(data)
        if isinstance(data.get("rope_theta"), int):
            data["rope_theta"] = float(data["rope_theta"])
        eos = data.get("eos_token_id")
        if not isinstance(eos, tuple):
            data["eos_token_id"] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        heads = data.get("num_attention_heads", cls.model_fields["num_attention_heads"].default)
        hidden = data.get("hidden_size", cls.model_fields["hidden_size"].default)
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            if not data.get("num_key_value_heads"):
                data["num_key_value_heads"] = heads
            if not data.get("head_dim"):
                if hidden % heads:
                    raise ValueError(
                        f"hidden_size % num_attention_heads = {hidden} % {heads} must be 0 where head_dim is unset"
                    )
                data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads % num_key_value_heads = {self.num_attention_heads} % {self.num_key_value_heads} "
                "must be 0"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even (rotary embedding turns pairs)")
        return self

    @property
    def dtype_name(self) -> str:
        """The stored dtype as the command line calls it: fp32, bf16 or fp16."""
        return _DTYPE_NAMES[self.dtype]

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """Reads a Hugging Face config.json, ignoring keys that do not shape the model.

        Raises:
            ManifestError: an architecture or an option that tk does not implement.
        """
        model_type = data.get("model_type")
        if model_type not in _ARCHITECTURE_CLASSES:
            raise ManifestError(
                f"{where}: model_type {model_type!r} is not supported; tk knows {', '.join(_ARCHITECTURE_CLASSES)}."
            )
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        unsupported = {
            "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
            "hidden_act": data.get("hidden_act", "silu") != "silu",
            "attention_bias": bool(data.get("attention_bias", False)),
            "mlp_bias": bool(data.get("mlp_bias", False)),
        }
        for key, is_unsupported in unsupported.items():
            if is_unsupported:
                raise ManifestError(
                    f"{where}: {key} = {data.get(key, rope.get(key))!r} is not supported for llama yet."
                )
        known = {key: data[key] for key in ModelConfig.model_fields if data.get(key) is not None}
        known["architecture"] = model_type
        known["dtype"] = data.get("dtype") or data.get("torch_dtype") or "float32"
        if rope.get("rope_theta") is not None:
            known["rope_theta"] = float(rope["rope_theta"])
        return parse(known, ModelConfig, where)

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
        data = self.model_dump(mode="json", exclude={"architecture", "dtype"})
        eos = list(self.eos_token_id)
        return data | {
            "architectures": [_ARCHITECTURE_CLASSES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "torch_dtype": self.dtype,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }
