"""Export of an adapter: its tensors as the folder that peft loads, with one file and PEFT's names."""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from ...core.layout import Layout
from ..format.peft_names import key_of
from ..format.safetensors_file import build_header
from ..read import hugging_face as hf
from ..read.reader import Checkpoint
from ..save.writer import PlannedFile
from .plan import CopyPlan
from .reshard import Options, Prepared, prepare_reshard
from .side_files import SideFile

_OF_THE_MODEL: Final = (hf.CONFIG, "generation_config.json")  # which peft's readers take from the base


def prepare_adapter_export(
    source: Checkpoint,
    target: str | os.PathLike[str],
    config: Mapping[str, Any],
    adapted: Collection[str],
    *,
    force: bool = False,
) -> Prepared:
    """Plans a folder of peft; `.run()` writes it. The tokenizer's files are copied, those about the model are not.

    Args:
        source: the checkpoint of the adapter.
        target: the new folder.
        config: the content of adapter_config.json.
        adapted: the modules that have an adapter.
        force: whether to replace a checkpoint at `target`.

    Raises:
        ConfigError, CheckpointError: see `prepare_reshard`.
    """
    plain = prepare_reshard(source, target, Options(Layout(), weights_only=True, plain=True, force=force))
    data = json.dumps(config, indent=2).encode()
    files = [file for file in plain.side_files if file.name not in _OF_THE_MODEL]
    files.append(SideFile(hf.ADAPTER_CONFIG, len(data), data))
    return replace(plain, plan=_in_one_file(plain.plan, adapted), side_files=tuple(files))


def _in_one_file(plan: CopyPlan, adapted: Collection[str]) -> CopyPlan:
    """Returns the plan with all tensors in PEFT's file, wider dtypes first."""
    entries = [entry for files in plan.files for file in files for entry in file.entries]
    entries.sort(key=lambda entry: -entry.dtype.itemsize)
    rows = [(key_of(entry.owned.tensor, adapted), entry.dtype.code, entry.owned.box.shape) for entry in entries]
    header, placed = build_header(rows, marked=False)
    moved = {
        entry.owned: replace(entry, begin=place.begin, end=place.end)
        for entry, place in zip(entries, placed, strict=True)
    }
    slot_copies = []
    for slot_copy in plan.slot_copies:
        targets = [replace(each, file=hf.ADAPTER_WEIGHTS, entry=moved[each.entry.owned]) for each in slot_copy.targets]
        slot_copies.append(replace(slot_copy, targets=tuple(targets)))
    file = PlannedFile(hf.ADAPTER_WEIGHTS, header, tuple(moved.values()))
    return CopyPlan(((file,),), tuple(slot_copies))
