"""Targets of some layers: those that peft's own rule selects."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError
from tk.model.adapter_export import prepare_peft_export
from tk.model.lora.peft_config import from_peft
from tk.model.lora.peft_layers import targets_of
from tk.model.stored_adapter import StoredAdapter
from tk.model.stored_config import stored_config
from tk.tests.model.lora.peft_adapters import (
    logits_of,
    make_with_peft,
    our_logits,
    read_with_peft,
    save_as_step,
    tensors_of,
)

NAMES = [
    *(f"model.layers.{layer}.{module}" for layer in range(12) for module in ("self_attn.q_proj", "mlp.up_proj")),
    *(f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer, expert in product(range(3), range(3))),
    *(f"transformer.h.{layer}.attn.c_attn" for layer in range(3)),
    "q_proj",
    "lm_head",
]


@pytest.mark.parametrize("layers", [0, 1, [1], [0, 2, 11], [], None])
@pytest.mark.parametrize("pattern", [None, "layers", ["layers"], "h", "experts", "blocks"])
@pytest.mark.parametrize(
    "targets", [["q_proj", "up_proj", "attn.c_attn"], ["layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"]]
)
def test_the_modules_are_those_that_peft_selects(targets: list[str], pattern: Any, layers: Any) -> None:
    if layers in ([], None):
        pattern = None  # which peft refuses alone
    config = {"target_modules": targets, "layers_to_transform": layers, "layers_pattern": pattern}
    theirs = LoraConfig(**config)
    expected = [name for name in NAMES if check_target_module_exists(theirs, name)]
    found = targets_of(config, "here")
    chosen = found if isinstance(found, str) else rf"(?:.*\.)?(?:{'|'.join(map(re.escape, found))})"
    assert [name for name in NAMES if re.fullmatch(chosen, name)] == expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["llama3", pytest.param("gpt2", marks=pytest.mark.matrix)])
def test_an_adapter_of_one_layer_has_pefts_logits_and_goes_back_to_it(tmp_path: Path, name: str) -> None:
    targets = {"llama3": ["q_proj", "down_proj"], "gpt2": ["c_attn", "c_fc"]}[name]
    base, adapter, expected = make_with_peft(name, tmp_path, target_modules=targets, layers_to_transform=[1])
    torch.testing.assert_close(our_logits(base, adapter), expected, atol=1e-5, rtol=1e-5)
    assert all(".1." in tensor for tensor in tensors_of(adapter))
    options = StoredAdapter.of(Checkpoint.open(adapter)).options
    step = save_as_step(tmp_path / "run", base, options, Checkpoint.open(base).layout)
    stored = StoredAdapter.of(Checkpoint.open(step))
    assert stored.options == options
    folder = prepare_peft_export(stored, stored_config(Checkpoint.open(base)), tmp_path / "again").run()
    assert tensors_of(folder).keys() == tensors_of(adapter).keys()
    again = logits_of(read_with_peft(base, folder))
    torch.testing.assert_close(our_logits(base, step), again, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_to_transform": [0, -1]}, "layers_to_transform = .* must be numbers"),
        ({"layers_to_transform": [True]}, "layers_to_transform = .* must be numbers"),
        ({"layers_to_transform": "all"}, "layers_to_transform = 'all' must be numbers"),
        ({"layers_to_transform": [0], "layers_pattern": ["h", "layers"]}, "layers_pattern = .* reads one name"),
        ({"layers_to_transform": [0], "layers_pattern": "h|x"}, "layers_pattern = 'h|x', and tk reads one name"),
        ({"layers_to_transform": [0], "layers_pattern": [3]}, "layers_pattern = .* reads one name"),
        ({"layers_to_transform": [0], "target_modules": "all-linear"}, "is for a list of names in target_modules"),
        ({"layers_pattern": "layers"}, "layers_pattern = 'layers' needs layers_to_transform"),
    ],
)
def test_values_that_do_not_map_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {"peft_type": "LORA", "target_modules": ["q_proj"]} | changes
    with pytest.raises(CheckpointError, match=f"^here: .*{message}"):
        from_peft(config, "here")
