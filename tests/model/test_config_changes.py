"""The net under config.json: every key, changed and taken out, gives the logits of `transformers` or an error.

The error names the key. Where `transformers` refuses a file, tk does too.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.tests.infer.engine.kernels.native.running import logits, runner
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.config_changes import (
    ABSENT,
    EXPERT_CHANGES,
    HEAD_CHANGES,
    LLAMA3,
    MIXED,
    ROPE_CHANGES,
    TOLERANCE,
    WINDOW_CHANGES,
    YARN,
    Change,
    Reader,
    single_changes,
)

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # in a GPT-2

NAMES = list(ENTRIES)
COMBINATIONS: dict[str, tuple[Sequence[Change], tuple[str, ...]]] = {
    "rope": (ROPE_CHANGES, ("llama3", "qwen2", "mixtral")),
    "window": (WINDOW_CHANGES, ("llama3", "mistral", "mixtral", "qwen2 sliding", "qwen2_moe", "qwen3", "qwen3_moe")),
    "experts": (EXPERT_CHANGES, ("mixtral", "qwen2_moe", "qwen3_moe")),
    "heads": (HEAD_CHANGES, ("llama3", "mistral", "qwen2", "qwen3")),
}
EVERY = [(kind, name) for kind, (_, names) in COMBINATIONS.items() for name in names]
TIES = [(tie, added) for tie in (ABSENT, True, False) for added in (None, 0.0, 0.5)]


def faults(reader: Reader, changes: Sequence[Change]) -> dict[str, str]:
    """Returns the faults of changes, by change."""
    found = {str(change).replace(repr(ABSENT), "ABSENT"): reader.fault(change) for change in changes}
    assert not reader.fault({}), "the model itself is read"
    return {change: fault for change, fault in found.items() if fault}


def read(name: str, folder: Path) -> Reader:
    ENTRIES[name].make(folder)
    return Reader(folder)


@pytest.fixture(scope="module")
def reader_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reader]:
    """Returns a model's reader, which tests share: each of them writes the config that it needs."""
    return cache(lambda name: read(name, tmp_path_factory.mktemp("model")))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_of_keys_by_themselves(name: str, reader_of: Callable[[str], Reader]) -> None:
    """Tries every key with one model or another; `make test` has every third model."""
    reader, first = reader_of(name), NAMES.index(name)
    changes = list(single_changes(reader.architecture.name, reader.saved))
    keys = list(dict.fromkeys(key for change in changes for key in change))
    chosen = [change for change in changes for key in change if keys.index(key) % len(NAMES) == first]
    assert faults(reader, chosen) == {}


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_every_key_by_itself(name: str, reader_of: Callable[[str], Reader]) -> None:
    reader = reader_of(name)
    changes = list(single_changes(reader.architecture.name, reader.saved))
    assert len(changes) > 150
    assert faults(reader, changes) == {}


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_a_choice_of_keys_together(kind: str, name: str, reader_of: Callable[[str], Reader]) -> None:
    assert faults(reader_of(name), COMBINATIONS[kind][0][EVERY.index((kind, name)) :: 67]) == {}


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_combination_of_keys_together(kind: str, name: str, reader_of: Callable[[str], Reader]) -> None:
    assert faults(reader_of(name), COMBINATIONS[kind][0]) == {}


@pytest.mark.parametrize(
    "name", ["qwen2", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("llama3", "gpt2", "gpt2 untied"))]
)
def test_a_head_and_a_tie_of_it(name: str, tmp_path: Path) -> None:
    """A file with a head, another head or none, whose config ties it, does not, or says nothing."""
    reader = read(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors.pop("lm_head.weight", None)
    [embedding] = [tensor for key, tensor in tensors.items() if key.endswith(("embed_tokens.weight", "wte.weight"))]
    for tie, added in TIES:
        stored = {} if added is None else {"lm_head.weight": (embedding if head is None else head) + added}
        save_file(tensors | stored, tmp_path / "model.safetensors", {"format": "pt"})
        assert reader.fault({"tie_word_embeddings": tie}) == "", f"{tie}, {added}"


@pytest.mark.skipif(not instruction_sets(), reason="no compiler")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"layer_types": MIXED, "sliding_window": 5}),
        ("llama3", {"rope_scaling": LLAMA3, "rope_theta": 900.0, "original_max_position_embeddings": 16}),
        ("qwen2", {"rope_scaling": YARN}),
        ("mixtral", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ],
)
def test_a_change_is_served_as_it_is_read(name: str, change: Change, tmp_path: Path) -> None:
    reader = read(name, tmp_path)
    reader.write(change)
    expected = reader.theirs()
    assert not isinstance(expected, str), expected
    made = runner(tmp_path)
    for tokens, wanted in zip(reader.tokens.tolist(), expected.numpy(), strict=True):
        found = logits(made, tokens, (7,))
        assert np.max(np.abs(found - wanted) / (1 + np.abs(wanted))) < TOLERANCE
    made.close()
