"""An adapter's folder as peft writes it, as a checkpoint: its tables are made from the header of its one file."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final, Literal

from ...core.errors import ManifestError
from ...core.garbage import no_garbage_collection
from ...core.layout import Layout
from ..files import small_files
from ..files.file_watch import FileWatch
from ..files.links import real_path
from ..format import json_strict as strict
from ..format.adapter_record import AdapterRecord, BaseRecord
from ..format.manifest import Manifest
from ..format.peft_names import names_of
from . import hugging_face as hf
from .hugging_face_weights import single_file
from .plain_folder import PlainFolder, plain_tables

_BASE: Final = "base_model_name_or_path"


class PeftFolder(PlainFolder):
    """A folder that holds an adapter, as `save_pretrained` of peft writes it.

    Tensors have their names in the model. The base has no identity, and the numbers of its weights in training are not
    known: PEFT records neither.
    """

    kind: ClassVar[Literal["peft"]] = "peft"
    own_files = (hf.ADAPTER_WEIGHTS, hf.ADAPTER_CONFIG)
    counts = f"{hf.ADAPTER_WEIGHTS} holds the adapter"

    @staticmethod
    @no_garbage_collection()
    def open(path: Path) -> "PeftFolder":
        """Opens a folder and reads its configuration and the header of its file.

        Raises:
            ManifestError: a file breaks a rule of its format, or a tensor's name is none of PEFT's.
            CheckpointError: a file belongs to a tk checkpoint, is a link that leads nowhere, or has changed meanwhile.
        """
        where = path / hf.ADAPTER_CONFIG
        file = real_path(path, hf.ADAPTER_CONFIG)
        watch = FileWatch.of(file)
        data = small_files.read_small(file, hf.MAX_SIDE_FILE)
        config = strict.mapping(strict.parse(data, str(where)), str(where))
        weights = single_file(path, hf.ADAPTER_WEIGHTS)
        watch.require_unchanged()
        names = names_of(weights.weight_map, str(path / hf.ADAPTER_WEIGHTS))
        tensors, chunks = plain_tables(path, weights, names)
        record = AdapterRecord(config, BaseRecord("", _base_of(config, str(where)), ""))
        return PeftFolder(path, weights, config, watch, (Manifest(0, Layout(), tensors, adapter=record), chunks))


def _base_of(config: Mapping[str, object], where: str) -> str:
    found = config.get(_BASE)
    if not isinstance(found, str | None):
        raise ManifestError(f"{where}: {_BASE} = {str(found)[:80]!r} must be the name of a folder, or null.")
    return strict.text(found or "", f"{where}: {_BASE}", 4096)
