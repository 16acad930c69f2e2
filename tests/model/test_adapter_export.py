"""Adapters to peft and from peft: equal logits both ways, for every architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint import Checkpoint
from tk.core.layout import Layout
from tk.model.adapter_export import explicit_targets, prepare_peft_export
from tk.model.config import ModelConfig
from tk.model.lora.options import LoraOptions
from tk.model.lora.stored_adapter import StoredAdapter
from tk.model.lora.table import with_adapters
from tk.model.registry import decoder_spec
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.lora.peft_adapters import (
    logits_of,
    make_with_peft,
    our_logits,
    read_with_peft,
    save_as_step,
)

# peft 0.21 asks transformers 5 for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FIRST = ("llama3", "gpt2")  # in `make test`


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.matrix) for name in ENTRIES]
)
def test_an_export_gives_the_same_logits_in_peft(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    ENTRIES[name].make(base)
    step = save_as_step(tmp_path / "run", base, LoraOptions(rank=4, alpha=6), Layout())
    adapter = StoredAdapter.of(Checkpoint.open(step))
    out = prepare_peft_export(adapter, ModelConfig.from_folder(base), tmp_path / "out").run()
    torch.testing.assert_close(logits_of(read_with_peft(base, out)), our_logits(base, step), rtol=1e-4, atol=1e-4)
