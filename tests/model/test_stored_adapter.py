"""An adapter's tensors against its base: each one that does not fit is refused by name, before anything is loaded."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint
from tk.core.errors import CheckpointError, ShapeMismatch
from tk.model.config import ModelConfig
from tk.model.lora.quick_patterns import require_quick
from tk.model.stored_adapter import StoredAdapter
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.lora.peft_adapters import make_with_peft, with_config

Tensors = dict[str, torch.Tensor]
AT = "base_model.model.model.layers.1.self_attn.q_proj"
NAME = "model.layers.1.self_attn.q_proj"

# peft 0.21 asks transformers 5 for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, and an adapter of its queries."""
    return make_with_peft("llama3", tmp_path_factory.mktemp("made"), target_modules=["q_proj"])[1]


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    """A copy of the adapter."""
    return Path(shutil.copytree(made, tmp_path / "adapter"))


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_json(ENTRIES[name].make_config().to_dict())


def stored(folder: Path) -> StoredAdapter:
    return StoredAdapter.of(Checkpoint.open(folder))


def edited(folder: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({AT.replace("q_", "k_") + ".lora_A.weight": torch.ones(4, 64)}), "holds .*k_proj.lora_A"),
        (lambda t: t.update({f"{AT}.lora_magnitude_vector": torch.ones(64)}), f"holds {NAME}.lora_magnitude_vector"),
        (lambda t: t.update({f"{AT}.löra_A.weight": torch.ones(1)}), f"holds {NAME}.löra_A.weight, which meets no mod"),
        (lambda t: t.update({f"{AT}.lora_A.weight": torch.ones(4, 63)}), rf"{NAME}.lora_A.weight has shape \[4, 63\]"),
        (lambda t: t.update({f"{AT}.lora_A.weight": torch.ones(5, 64)}), r"shape \[5, 64\], but .* require \[4, 64\]"),
        (lambda t: t.update({f"{AT}.lora_B.weight": torch.ones(64, 4, 1)}), rf"{NAME}.lora_B.weight has shape \[64, 4"),
        (
            lambda t: t.update({f"{AT}.lora_A.weight": torch.ones(4, 64).int()}),
            "lora_A.weight is stored as I32, and an",
        ),
        (lambda t: t.pop(f"{AT}.lora_B.weight"), f"has no {NAME}.lora_B.weight, which its configuration requires"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    adapter: Path, edit: Callable[[Tensors], object], words: str
) -> None:
    assert stored(adapter).decoder(config_of("llama3")).adapters
    with pytest.raises(ShapeMismatch, match=words):
        stored(edited(adapter, edit)).decoder(config_of("llama3"))


def test_another_architecture_and_orientation_are_refused(adapter: Path) -> None:
    with pytest.raises(ShapeMismatch, match="is no adapter of this base"):
        stored(adapter).decoder(config_of("gpt2"))
    with pytest.raises(ShapeMismatch, match=r"fan_in_fan_out = true, but weights of llama are stored \[out, in\]"):
        stored(with_config(adapter, fan_in_fan_out=True)).decoder(config_of("llama3"))


def test_a_regular_expression_that_does_not_end_is_refused(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = partial(require_quick, seconds=0.3)
    monkeypatch.setattr("tk.model.stored_adapter.require_quick", quick)
    with pytest.raises(ShapeMismatch, match=r"takes more than 0\.3 s"):
        stored(with_config(adapter, target_modules=r"([\w.]+)+!")).decoder(config_of("llama3"))


def test_entries_that_select_nothing_are_no_error(adapter: Path) -> None:
    """PEFT's users list the names of several architectures."""
    plain = stored(adapter).decoder(config_of("llama3"))
    changes = {
        "target_modules": ["q_proj", "query_key_value"],
        "exclude_modules": ["lm_head", "nothing"],
        "modules_to_save": ["classifier"],
        "rank_pattern": {"k_proj": 2, "nothing": 3},
        "alpha_pattern": {"nothing": 3},
    }
    assert stored(with_config(adapter, **changes)).decoder(config_of("llama3")) == plain


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (float("-inf"), torch.float16)],
)
def test_values_are_finite(adapter: Path, value: float, dtype: torch.dtype) -> None:
    key = f"{AT}.lora_B.weight"

    def narrow(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    stored(edited(adapter, narrow)).check_values()
    edited(adapter, lambda tensors: tensors[key].view(-1)[-1:].fill_(value))
    with pytest.raises(CheckpointError, match=f"{NAME}.lora_B.weight holds NaN or an infinity"):
        stored(adapter).check_values()


def test_a_model_is_no_adapter(made: Path) -> None:
    with pytest.raises(CheckpointError, match="holds a model, not an adapter of one"):
        StoredAdapter.of(Checkpoint.open(made.parent / "base"))
