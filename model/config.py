"""A model's shape, with the key names of Hugging Face's config.json, in both of their spellings.

One class holds the options of every architecture; which of them an architecture has, and what its config.json calls
them, its own file says (see `spec.Architecture`). An option that is not its own is refused.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from ..core.config import Section, parse
from ..core.errors import ConfigError, ManifestError
from .spec import Architecture, RopeScaling

_DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_DTYPES = tuple(_DTYPE_NAMES)
_SHARED = frozenset(
    {"architecture", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    | {"max_position_embeddings", "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype"}
)  # fields of every architecture; the others belong to those that name them


class ModelConfig(Section):
    """Shape of a decoder. The `[model]` section of a training config and a checkpoint's config.json both end here.

    Attributes:
        head_dim: 0 = hidden_size / num_attention_heads.
        num_key_value_heads: 0 = num_attention_heads.
        eos_token_id: ids that end a text.
        dtype: of the stored weights, as config.json spells it.
        rope_scaling: Llama 3's; None = none.
        sliding_window: positions that a query sees, its own included; None = all before it.
        max_window_layers: so many layers, the first ones, have no sliding window.
        moe_intermediate_size: of each expert, where dense layers have another.
        norm_topk_prob: whether the chosen experts' probabilities are scaled to sum to 1.
        decoder_sparse_step: every so many layers have experts, but never those in `mlp_only_layers`.
        router_aux_loss_coef: weight of the routers' load-balancing loss in training (see balance.py).
    """

    architecture: str = "llama"
    vocab_size: int = Field(default=0, ge=0, le=2**28)
    hidden_size: int = Field(default=256, ge=1, le=2**24)
    intermediate_size: int = Field(default=688, ge=1, le=2**24)
    num_hidden_layers: int = Field(default=4, ge=1, le=10_000)
    num_attention_heads: int = Field(default=4, ge=1, le=2**16)
    max_position_embeddings: int = Field(default=2048, ge=1, le=2**31)
    initializer_range: float = Field(default=0.02, gt=0)
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    dtype: str = "float32"

    num_key_value_heads: int = Field(default=0, ge=0)
    head_dim: int = Field(default=0, ge=0, le=2**16)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    sliding_window: int | None = Field(default=None, ge=1)
    max_window_layers: int = Field(default=0, ge=0)
    num_local_experts: int = Field(default=8, ge=1, le=2**16)
    num_experts_per_tok: int = Field(default=2, ge=1)
    moe_intermediate_size: int = Field(default=768, ge=1)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(default=1, ge=1)
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = Field(default=0.001, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # refused by what follows
        data = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        eos = data.get("eos_token_id")
        if not isinstance(eos, tuple):
            data["eos_token_id"] = () if eos is None else (eos,)
        heads = data.get("num_attention_heads", cls.model_fields["num_attention_heads"].default)
        hidden = data.get("hidden_size", cls.model_fields["hidden_size"].default)
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden > 0:
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
        if self.num_experts_per_tok > self.num_local_experts:
            raise ValueError(f"num_experts_per_tok = {self.num_experts_per_tok} of {self.num_local_experts} experts")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype = {self.dtype!r} must be one of {', '.join(_DTYPES)}")
        self._refuse_foreign_options()
        return self

    def _refuse_foreign_options(self) -> None:
        own = _SHARED | _architecture(self.architecture, "architecture").options
        unset = {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
        }
        for name, field in ModelConfig.model_fields.items():
            if name not in own and getattr(self, name) != unset.get(name, field.default):
                raise ValueError(f"{name} = {getattr(self, name)!r} is no option of {self.architecture}")

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
    from .registry import architectures  # whose architectures' files import this module

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
