"""Changes of config.json, one key at a time and in combinations, and the models that tk and `transformers` read."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tk.checkpoint import Checkpoint
from tk.core.errors import TkError
from tk.model.config_keys import CHANGE_NOTHING, NEUTRAL, QUANTIZED
from tk.model.decoder import Decoder
from tk.model.loading import load_weights
from tk.model.registry import architectures
from tk.model.rope_keys import ROPE_KEYS
from tk.model.stored_config import stored_config
from tk.parallel.layers import LayerContext
from tk.parallel.mesh import ALONE
from tk.tests.model.architectures import LENGTH, VOCAB
from tk.train.engine.attention import causal_attention

Change = Mapping[str, Any]
ABSENT: Final = object()  # the value of a key that a change takes out
FULL, SLIDING = ["full_attention"] * 3, ["sliding_attention"] * 3
MIXED = [FULL[0], SLIDING[0], FULL[0]]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
REFUSALS = (  # of transformers
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
WINDOWLESS = "Could not find a `sliding_window` argument"
HEADLESS = "unsupported operand type(s) for *: 'NoneType' and 'float'"
# Of experts outside of a token's groups transformers makes zeros, all alike: it then takes any of them.
TOO_FEW = "fewer than num_experts_per_tok"
TOLERANCE = 2e-3  # of |difference| / (1 + |logit|) in fp32
# Values to try, for keys of which the default and its neighbour are not enough.
VALUES: Final[Mapping[str, list[Any]]] = {
    "activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu", "relu"],
    "attention_chunk_size": [4],
    "compression_config": [{"quant_method": "compressed-tensors"}],
    "decoder_sparse_step": [2],
    "dtype": ["bfloat16", "float64", "auto"],
    "eos_token_id": [1, [1, 2]],
    "head_dim": [8, 16, 24],
    "hidden_act": ["silu", "gelu", "gelu_new", "relu"],
    "initializer_range": [0.5, 0.02],
    "is_causal": [True, False],
    "kv_sharing_modes": [["own", "reuse", "reuse"]],
    "layer_types": [FULL, SLIDING, MIXED, SLIDING[:1], ["chunked_attention"] * 3, []],
    "layer_norm_epsilon": [0.5],
    "max_position_embeddings": [33, 128],
    "max_window_layers": [0, 1, 2, 5],
    "mlp_layer_types": [["dense"] * 3],
    "mlp_only_layers": [[], [0], [1], [1, 7]],
    "n_group": [1, 2, 4],
    "norm_topk_prob": [True, False],
    "n_routed_experts": [3, 4, 8],
    "n_shared_experts": [1, 2],
    "num_experts": [3, 4, 6, 8],
    "num_experts_per_tok": [1, 2, 3, 4, 9],
    "num_hidden_layers": [1, 4],
    "num_key_value_heads": [1, 2, 4],
    "num_local_experts": [3, 4, 6, 8],
    "original_max_position_embeddings": [16, 64],
    "partial_rotary_factor": [0.5, 1.0],
    "per_layer_config": [{}, {"0": {"sliding_window": 4}}, {"0": {"rms_norm_eps": 0.5}}],
    "quantization_config": [{"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}, {}],
    "rms_norm_eps": [0.5],
    "rope_parameters": [
        *({}, {"rope_theta": 777.0}, {"rope_theta": None}, {"rope_type": "default"}, {"rope_type": None}),
        *(
            LLAMA3 | {"rope_theta": 5000.0},
            LLAMA3,
            {"type": "llama3", **LLAMA3},
            {"rope_type": "default", "factor": 2.0},
        ),
        *(YARN, YARN | {"truncate": False, "beta_fast": 4.0}, YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
        *({"rope_type": "linear", "factor": 4.0}, {"rope_type": "dynamic", "factor": 2.0}),
        *({"type": "yarn", "rope_type": "default"}, {"rope_type": "default", "partial_rotary_factor": 0.5}),
        *({name: {"rope_theta": 5e5, "rope_type": "default"}} for name in (FULL[0], SLIDING[0])),
    ],
    "rope_scaling": [
        *(
            {},
            LLAMA3,
            LLAMA3 | {"original_max_position_embeddings": 16},
            {"rope_type": "default"},
            {"rope_theta": 777.0},
        ),
        *({"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}, {"rope_type": None, "factor": 2.0}),
        *({"type": "yarn", "factor": 4.0, "attention_factor": 1.5}, YARN | {"factor": None}, {"type": "yarn"}),
        *(YARN | {"beta_fast": None, "beta_slow": 2}, YARN | {"truncate": None}, {"type": "linear"}),
        *({"partial_rotary_factor": 0.5}, {FULL[0]: {"rope_theta": 5e5}}, 5),
    ],
    "rope_theta": [777.0, 777],
    "sliding_window": [1, 5, 64],
    "topk_group": [1, 2, 3, 4, 5],
    "torch_dtype": ["bfloat16", "float64"],
    "vocab_size": [VOCAB - 1, VOCAB + 1],
}
# Keys that no config class has, but that code of `transformers` reads or that other architectures have.
BEYOND: Final = (
    *ROPE_KEYS, *QUANTIZED, *NEUTRAL, "layer_types", "use_sliding_window", "max_window_layers", "head_dim",
    "num_key_value_heads", "num_experts", "num_local_experts", "hidden_size", "n_embd", "max_position_embeddings",
    "n_positions", "num_hidden_layers", "attention_bias", "mlp_bias", "rms_norm_eps", "norm_topk_prob", "hidden_act",
    "activation_function", "torch_dtype", "attn_implementation", "mlp_layer_types", "tie_last_hidden_states",
    "partial_rotary_factor", "temperature", "n_ctx", "no_such_key",
)  # fmt: skip
# Keys that transformers refuses for a reason that is no model's: by type, or for other tasks.
_OTHER_REASONS: Final = CHANGE_NOTHING | {"num_labels", "auto_map"}


def single_changes(model_type: str, saved: Change) -> Iterator[Change]:
    """Yields every key of the config class, of the saved file and beyond: taken out, null, and with other values."""
    fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    for key in dict.fromkeys((*fields, *saved, *BEYOND)):
        if key in ("model_type", "transformers_version", "id2label", "label2id"):
            continue
        found = saved.get(key, fields.get(key))
        values = VALUES.get(key, [*_neighbours(found)])
        for value in ([ABSENT] if key in saved else []) + [None, *values]:
            yield {key: value}


def _neighbours(value: object) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str):
        yield f"{value}x"
    elif value is None:
        yield 1


def _product(**values: Iterable[Any]) -> list[Change]:
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


ROPE_CHANGES: Final = _product(
    rope_parameters=[ABSENT, {"rope_theta": 777.0, "rope_type": "default"}, LLAMA3 | {"rope_theta": 5000.0}],
    rope_scaling=[ABSENT, None, {}, {"rope_type": "default"}, LLAMA3, YARN, YARN | {"rope_theta": 999.0}],
    rope_theta=[ABSENT, 555.0],
    original_max_position_embeddings=[ABSENT, 16],
)
WINDOW_CHANGES: Final = _product(
    layer_types=[ABSENT, None, FULL, SLIDING, MIXED],
    sliding_window=[ABSENT, None, 5],
    use_sliding_window=[ABSENT, True, False],
    max_window_layers=[ABSENT, 0, 2],
)
EXPERT_CHANGES: Final = _product(
    num_experts_per_tok=[ABSENT, 1, 3],
    norm_topk_prob=[ABSENT, True, False],
    mlp_only_layers=[ABSENT, None, [1], [0]],
    decoder_sparse_step=[ABSENT, 1, 2],
)
HEAD_CHANGES: Final = _product(
    num_attention_heads=[8, 4],
    num_key_value_heads=[ABSENT, None, 1, 2, 4],
    head_dim=[ABSENT, None, 8, 16],
)


class Reader:
    """A saved model whose config.json is changed, and read again by both.

    Args:
        folder: where `transformers` saved the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.architecture = architectures()[self.saved["model_type"]]
        self.tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))

    def write(self, change: Change) -> None:
        """Writes the saved config.json with a change."""
        changed = {key: value for key, value in {**self.saved, **change}.items() if value is not ABSENT}
        (self.folder / "config.json").write_text(json.dumps(changed))

    def fault(self, change: Change) -> str:
        """Returns what is wrong with tk's reading of a change, "" if nothing is: its logits, or its refusal."""
        self.write(change)
        mine = self.mine()
        if isinstance(mine, str) and self._is_named(change, mine) and any(map(self._may_be_refused, change)):
            return ""
        if isinstance(mine, str) and TOO_FEW in mine and "n_group" in self.architecture.options:
            return ""
        theirs = self.theirs()
        if isinstance(mine, str):
            return "" if isinstance(theirs, str) else f"transformers reads it, and tk refuses it: {mine}"
        if isinstance(theirs, str) and WINDOWLESS in theirs and SLIDING[0] not in str(change.get("layer_types")):
            return ""  # transformers makes the mask of a window for a Ministral in which no layer has one
        if isinstance(theirs, str) and HEADLESS in theirs and "'yarn'" in str(change):
            return ""  # transformers multiplies by a Mixtral's head_dim, which is None unless the file has it
        if isinstance(theirs, str):
            return "" if change.keys() <= self._harmless() else f"read, and transformers refuses it: {theirs}"
        difference = float(((mine - theirs).abs() / (1 + theirs.abs())).max())
        return "" if difference < TOLERANCE else f"the logits differ by {difference:.2g}"

    def mine(self) -> torch.Tensor | str:
        """Returns the logits of tk's decoder, or the text of the error."""
        try:
            checkpoint = Checkpoint.open(self.folder)
            decoder = Decoder(stored_config(checkpoint), LayerContext(ALONE, torch.float32, torch.device("cpu")))
            load_weights(decoder, checkpoint)
        except TkError as error:
            return str(error).replace(str(self.folder), "")
        with torch.no_grad():
            hidden = decoder(self.tokens, torch.arange(LENGTH).expand(2, LENGTH), causal_attention)
            return decoder.logits(hidden)[..., :VOCAB]

    def theirs(self) -> torch.Tensor | str:
        """Returns the logits of `transformers`, or the text of the error; weights that it draws are one too."""
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                self.folder, dtype=torch.float32, output_loading_info=True
            )
            if info["missing_keys"]:
                return f"missing {min(info['missing_keys'])}"
            with torch.no_grad():
                logits: torch.Tensor = model.eval()(self.tokens, return_dict=True).logits
        except REFUSALS as error:
            return f"{type(error).__name__}: {error}"
        return logits

    def _is_named(self, change: Change, error: str) -> bool:
        """Returns whether an error names a changed key, a key inside of its value, or the field that it gives."""
        inside = {name for value in change.values() if isinstance(value, dict) for name in value}
        fields = {field for field, names in self.architecture.keys.items() if change.keys() & set(names)}
        return any(name in error for name in change.keys() | inside | fields)

    def _may_be_refused(self, key: str) -> bool:
        """Returns whether tk may refuse values of a key that `transformers` reads."""
        own = self.architecture
        fewer_tensors = {
            own.keys.get(field, (field,))[0]
            for field in ("num_hidden_layers", "qkv_bias", "use_qk_norm")
            if field == "num_hidden_layers" or field in own.options
        }
        elsewhere = {*NEUTRAL, *ROPE_KEYS, *QUANTIZED, "dtype", "torch_dtype", "layer_types"} - own.defaults.keys()
        second_names = {name for names in own.keys.values() for name in names[1:]}
        return key in elsewhere | own.requires.keys() | second_names | fewer_tensors

    def _harmless(self) -> frozenset[str]:
        """Returns the keys whose values transformers refuses for reasons that are not the model's."""
        rotary = () if "rope_theta" in self.architecture.defaults else ROPE_KEYS
        return frozenset(_OTHER_REASONS | self.architecture.ignored | set(rotary))
