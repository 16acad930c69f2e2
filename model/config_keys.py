"""The keys of config.json, each in one of three lists: it makes the model, it changes nothing, or tk lacks its feature.

An architecture lists its own keys (see `spec.Architecture`), this module those of all. A key in none of the lists is
one that no supported model class of `transformers` has; `unknown_keys` names it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .rope_keys import ROPE_KEYS
from .spec import Architecture

# Keys of features that tk lacks, with the values that leave them out; a file without the key leaves them out too.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "attention_chunk_size": (None,),
        "fusion_config": (None, {}),
        "is_causal": (True,),
        "is_encoder_decoder": (False, None),
        "kv_sharing_modes": (None,),
        "per_layer_config": (None, {}),
        "sliding_window": (None,),
    }
)
QUANTIZED: Final = ("quantization_config", "compression_config")
READ_HERE: Final = frozenset({"model_type", "dtype", "torch_dtype", "layer_types", *ROPE_KEYS, *QUANTIZED})
CHANGE_NOTHING: Final = frozenset(
    {
        "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures", "attn_implementation",
        "auto_map", "chunk_size_feed_forward", "experts_implementation", "gradient_checkpointing", "id2label",
        "label2id", "mlp_layer_types", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
        "pad_token_id", "problem_type", "return_dict", "task_specific_params", "tie_last_hidden_states",
        "transformers_version", "transformers_weights", "use_cache",
    }
)  # fmt: skip
_GENERATION: Final = frozenset(
    {
        "do_sample", "early_stopping", "length_penalty", "max_length", "max_new_tokens", "min_length",
        "no_repeat_ngram_size", "num_beams", "num_return_sequences", "repetition_penalty", "temperature", "top_k",
        "top_p", "typical_p",
    }
)  # fmt: skip
_SIZES: Final = ("num_key_value_heads", "head_dim")  # 0 leaves them to tk in [model], and has no meaning in config.json
_DEQUANTIZED: Final = (
    "load it with transformers, call {how} and save_pretrained(), and name the folder that this writes"
)
_SAVE_IN_16_BITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bitsandbytes": _DEQUANTIZED.format(how="model.dequantize()"),
        "fp8": _DEQUANTIZED.format(
            how="from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True))"
        ),
        "mxfp4": _DEQUANTIZED.format(how="from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True))"),
    }
)  # the way back from a format that keeps what the original had, or nearly; others lose it


def refuse_unsupported(data: Mapping[str, Any], architecture: Architecture) -> None:
    """Checks that no key of a config.json asks for a feature that tk lacks.

    Raises:
        ValueError: one does; the message names it.
    """
    refuse_quantized(data)
    wanted = {**NEUTRAL, **{key: (value,) for key, value in architecture.requires.items()}}
    for key, values in wanted.items():
        if key in data and key not in architecture.defaults and not any(_same(data[key], value) for value in values):
            right = "missing" if values[0] is None else f"{values[0]!r} or missing"
            raise ValueError(f"{key} = {data[key]!r} is not supported for {architecture.name}; it must be {right}")


def refuse_quantized(data: Mapping[str, Any]) -> None:
    """Checks that the weights are stored as numbers and not as codes of a quantization.

    Raises:
        ValueError: config.json says that they are; the message names the method and the folder to use instead.
    """
    for key in QUANTIZED:
        found = data.get(key)
        if found is not None:
            method = str(found.get("quant_method", "unknown") if isinstance(found, Mapping) else found)[:40]
            raise ValueError(f"{key} says that the weights are quantized ({method}). {unquantized(method)}")


def unquantized(method: str = "") -> str:
    """Returns the advice for a folder of quantized weights, without its last full stop.

    Args:
        method: the method's name in config.json, "" if it is not known.
    """
    original = "Name the folder of the model that was quantized, in bf16 or fp16 (its card links it)"
    known = f", or {_SAVE_IN_16_BITS[method]}" if method in _SAVE_IN_16_BITS else ""
    return f"{original}{known}; tk quantizes by itself at load (--weight-dtype of tk serve)"


def model_values(data: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Returns the keys that make the model by the names of ModelShape's fields; a missing one has its default.

    Raises:
        ValueError: a key is null that must not be, or two spellings of one key differ.
    """
    values = {}
    fields = {spelling: field for field, spellings in architecture.keys.items() for spelling in spellings}
    for key, default in architecture.defaults.items():
        field = fields.get(key, key)
        spellings = [name for name in architecture.keys.get(field, (key,)) if name in data]
        found = [data[name] for name in spellings]
        if None in found and key not in architecture.nullable:
            raise ValueError(
                f"{spellings[found.index(None)]} must not be null for {architecture.name}; a file without it has "
                f"{default!r}"
            )
        if field in _SIZES and 0 in found:
            raise ValueError(f"{spellings[0]} = 0 must be 1 or more")
        if any(not _same(value, found[0]) for value in found):
            both = " and ".join(f"{name} = {value!r}" for name, value in zip(spellings, found, strict=True))
            raise ValueError(f"{both} are one key of {architecture.name} and must be equal: remove one of them")
        values[field] = found[0] if found else default
    return values


def unknown_keys(data: Mapping[str, Any], architecture: Architecture) -> list[str]:
    """Returns the keys with a value that no list has, and that tk therefore ignores as `transformers` does."""
    spellings = {name for names in architecture.keys.values() for name in names}
    known = READ_HERE | CHANGE_NOTHING | _GENERATION | NEUTRAL.keys() | spellings
    known |= architecture.defaults.keys() | architecture.requires.keys() | architecture.ignored
    return [key for key, value in data.items() if key not in known and value not in (None, False, "", [], {})]


def _same(value: object, other: object) -> bool:
    """Returns whether two values of JSON are equal and of one type; 0 is not false, and 1 is 1.0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
