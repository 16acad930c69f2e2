"""A Hugging Face folder of safetensors files as a checkpoint: its tables are made from the files' headers."""

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from ...core.garbage import no_garbage_collection
from ...core.layout import Layout
from ..files.file_watch import FileWatch
from ..files.links import real_path
from ..format.manifest import Manifest, StoredTensor
from . import hugging_face as hf
from .hugging_face_weights import find_weights
from .plain_folder import PlainFolder, plain_tables

# The name of the base model inside the full model, by config.json's model_type, for the architectures that tk runs.
# Files of the base model alone lack this prefix. Names of other architectures are not changed.
BASE_PREFIXES: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "model.")
    | {"gpt2": "transformer."}
)
_BUFFERS: Final = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
)  # constants that old files of these architectures hold
_HEAD: Final = "lm_head.weight"
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight")
_TIED_UNLESS_SAID: Final = frozenset({"gpt2"})  # model types whose head is tied unless config.json unties it


class HuggingFaceFolder(PlainFolder):
    """A folder that holds a model, as `save_pretrained` of transformers writes it.

    Tensors have their names in the files. If tk runs the architecture and the files hold the base model alone, the base
    model's prefix is added to the names.
    """

    kind: ClassVar[Literal["huggingface"]] = "huggingface"

    @staticmethod
    @no_garbage_collection()
    def open(path: Path) -> "HuggingFaceFolder":
        """Opens a folder and reads the headers of all files. Raises the errors of `find_weights`.

        CheckpointError also if config or index change meanwhile: they would be of other weights than the headers.
        """
        watch = FileWatch.of(*(real_path(path, name) for name in (hf.CONFIG, hf.INDEX)))
        config = hf.read_config(path)
        weights = find_weights(path, config)
        watch.require_unchanged()
        tensors, chunks = plain_tables(path, weights, _names(weights.weight_map, config))
        manifest = Manifest(0, Layout(), tensors, _tied_head(config, tensors))
        folder = HuggingFaceFolder(path, weights, config, watch, (manifest, chunks))
        single = hf.SINGLE in folder.data_files
        folder.own_files = folder.data_files if single else folder.data_files | {hf.INDEX}
        folder.counts = f"{hf.SINGLE} is read instead" if single else f"{hf.INDEX} does not name it"
        return folder


def _names(stored: Collection[str], config: Mapping[str, object]) -> dict[str, str]:
    """Returns the name in the model of each stored tensor that the model has."""
    base = BASE_PREFIXES.get(_model_type(config), "")
    prefix = "" if any(name.startswith(base) for name in stored) else base
    names = {
        name: name if name.startswith("lm_head.") else prefix + name
        for name in stored
        if not (base and name.endswith(_BUFFERS))
    }
    if base and _is_tied(config) and _HEAD in names and not any(name.endswith(_EMBEDDINGS) for name in names):
        # Only the head of a tied model is stored: `transformers` ties the embedding to it.
        names[_HEAD] = base + _EMBEDDINGS[_model_type(config) == "gpt2"]
    return names


def _model_type(config: Mapping[str, object]) -> str:
    return str(config.get("model_type", ""))


def _is_tied(config: Mapping[str, object]) -> bool:
    return config.get("tie_word_embeddings", _model_type(config) in _TIED_UNLESS_SAID) is True


def _tied_head(config: Mapping[str, object], tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    if _HEAD in tensors or len(embeddings) != 1 or not _is_tied(config):
        return {}
    return {_HEAD: embeddings[0]}
