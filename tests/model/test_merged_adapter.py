"""The merge of an adapter into its base: equal to `peft`'s, rounded once, and of the right base only."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tk.checkpoint import Checkpoint, reshard
from tk.checkpoint.convert.copy import run_copy
from tk.checkpoint.convert.identity import weights_identity
from tk.core.errors import CheckpointError, ConfigError
from tk.core.layout import Layout
from tk.model.config import ModelConfig
from tk.model.lora.options import LoraOptions
from tk.model.merged_adapter import AdapterMerge, base_config, open_base, prepare_merge, require_base
from tk.model.registry import tensor_table
from tk.model.stored_adapter import StoredAdapter
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.lora.peft_adapters import (
    differing,
    logits_of,
    make_with_peft,
    our_logits,
    read_with_peft,
    save_as_step,
    tensors_of,
    with_config,
)

# peft 0.21 asks transformers 5 for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FIRST = ("llama3", "gpt2")  # in `make test`


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama and an adapter of its queries: `base` and `adapter`."""
    home = tmp_path_factory.mktemp("made")
    make_with_peft("llama3", home, target_modules=["q_proj"])
    return home


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of both."""
    base, adapter = (Path(shutil.copytree(made / name, tmp_path / name)) for name in ("base", "adapter"))
    return base, with_config(adapter, base_model_name_or_path=str(base))


def stored(path: Path) -> StoredAdapter:
    return StoredAdapter.of(Checkpoint.open(path))


def model_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns a model's tensors, read without our code."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FIRST else pytest.mark.matrix) for each in ENTRIES]
)
def test_a_merge_equals_that_of_peft(tmp_path: Path, name: str) -> None:
    biases = {"bias": "all", "modules_to_save": ["wpe"]} if name.startswith("gpt2") else {}
    targets = ["q_proj", "v_proj"] if "moe" in name or name == "mixtral" else "all-linear"
    base, adapter, _ = make_with_peft(name, tmp_path, biases=True, target_modules=targets, **biases)
    found = prepare_merge(stored(adapter), Checkpoint.open(base), tmp_path / "out", plain=True).run()
    read_with_peft(base, adapter, merged=True).save_pretrained(tmp_path / "theirs")
    assert differing(model_tensors(found), model_tensors(tmp_path / "theirs"), 1e-6) == []


@pytest.mark.parametrize("name", ["mixtral", pytest.param("glm4_moe", marks=pytest.mark.matrix)])
def test_adapters_of_experts_are_added_to_each_expert(tmp_path: Path, name: str) -> None:
    """peft has no such merge: transformers stacks experts. Our decoder with the adapter is the oracle."""
    base = tmp_path / "base"
    ENTRIES[name].make(base)
    step = save_as_step(tmp_path / "run", base, LoraOptions(rank=4, alpha=6), Layout(tp=2))
    out = prepare_merge(stored(step), Checkpoint.open(base), tmp_path / "out").run()
    assert Checkpoint.open(out).verify().ok
    found = logits_of(AutoModelForCausalLM.from_pretrained(out).eval())
    torch.testing.assert_close(found, our_logits(base, step), rtol=1e-4, atol=1e-4)


def test_a_sum_is_rounded_once_and_what_was_lost_is_counted(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    AutoModelForCausalLM.from_pretrained(base).bfloat16().save_pretrained(tmp_path / "narrow")
    scale, before, factors = 0.02 / 4, load_file(tmp_path / "narrow" / "model.safetensors"), tensors_of(adapter)
    prepared = prepare_merge(
        stored(with_config(adapter, lora_alpha=0.02)),
        Checkpoint.open(tmp_path / "narrow"),
        tmp_path / "out",
        plain=True,
    )
    after, kept, total = model_tensors(prepared.run()), 0, 0
    for name, value in before.items():
        module = name.removesuffix(".weight")
        if not module.endswith("q_proj"):
            assert torch.equal(after[name], value)
            continue
        delta = (factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]) * scale
        exact = value.double() + delta.double()
        below = (after[name].double() - exact).abs()
        assert (after[name] == exact.bfloat16()).double().mean() > 0.999, "one rounding"
        assert after[name].dtype == torch.bfloat16
        assert (below <= (value.double() - exact).abs() + 1e-9).all(), "no value of bf16 is nearer than the sum's"
        kept += int(((after[name] == value) & (delta != 0)).sum())
        total += value.numel()
    assert prepared.change is not None
    assert prepared.change.facts() == {"adapted_elements": total, "kept_elements": kept}
    assert 0 < kept < total
    assert prepared.change.sentence() == (
        f"{100 * kept / total:.2g} % of the weights with an adapter kept their value: the sum was rounded away"
    )


def test_tiles_of_any_size_give_the_same_sums(tmp_path: Path) -> None:
    """GPT-2's weights are transposed; a tile of 100 bytes ends within a row."""
    base, adapter, _ = make_with_peft("gpt2", tmp_path, target_modules=["c_attn", "c_proj"])
    prepared = prepare_merge(stored(adapter), Checkpoint.open(base), tmp_path / "out", plain=True)
    whole = model_tensors(prepared.run())
    (tmp_path / "small").mkdir()
    spec = stored(adapter).decoder(ModelConfig.from_folder(base))
    change = AdapterMerge(stored(adapter), spec)
    run_copy(prepared.plan, prepared.source, tmp_path / "small", tile_bytes=100, change=change)
    assert differing(model_tensors(tmp_path / "small"), whole, 1e-6) == []
    assert prepared.change is not None
    assert change.facts() == prepared.change.facts()
    assert change.sentence() == "every weight with an adapter has its sum"


def test_a_base_of_any_layout_is_merged(tmp_path: Path) -> None:
    base, adapter, _ = make_with_peft("llama3", tmp_path, target_modules="all-linear", modules_to_save=["norm"])
    table = tensor_table(ModelConfig.from_folder(base))
    reshard(base, tmp_path / "sharded", layout=Layout(tp=2, pp=3), table=table)
    one = prepare_merge(stored(adapter), Checkpoint.open(base), tmp_path / "one").run()
    two = prepare_merge(stored(adapter), Checkpoint.open(tmp_path / "sharded"), tmp_path / "two").run()
    assert differing(model_tensors(one), model_tensors(two), 0.0) == []


def test_another_base_is_refused_and_an_unnamed_one_asked_for(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base, adapter = pair
    names = [spec.name for spec in tensor_table(ModelConfig.from_folder(base)) if not spec.alias]
    identity = weights_identity(Checkpoint.open(base), names)
    step = save_as_step(tmp_path / "run", base, LoraOptions(rank=4, targets=("q_proj",)), Layout(), identity=identity)
    assert require_base(stored(step), open_base(stored(step)))
    assert not require_base(stored(adapter), open_base(stored(adapter))), "peft records no identity"
    with torch.no_grad():
        other = AutoModelForCausalLM.from_pretrained(base)
        other.model.norm.weight[0] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"is an adapter of another base than .*other: it was trained on .*base"):
        require_base(stored(step), open_base(stored(step), tmp_path / "other"))
    with pytest.raises(CheckpointError, match="holds an adapter, not a model"):
        require_base(stored(step), open_base(stored(step), adapter))
    with pytest.raises(ConfigError, match=r"does not say what its base is. Name that model: --base CKPT"):
        open_base(stored(with_config(adapter, base_model_name_or_path=None)))
    with pytest.raises(CheckpointError, match=r"was trained on org/gone, which does not open: .* --base CKPT"):
        open_base(stored(with_config(adapter, base_model_name_or_path="org/gone")))
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/gone does not exist"):
        open_base(stored(adapter), tmp_path / "gone")


def test_the_shape_of_a_base_is_read_beside_the_adapter_or_from_the_base(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = pair
    step = save_as_step(tmp_path / "run", base, LoraOptions(rank=4, targets=("q_proj",)), Layout())
    assert base_config(stored(adapter)) == ModelConfig.from_folder(base)
    base.rename(tmp_path / "moved")
    assert base_config(stored(step)) == base_config(stored(adapter), tmp_path / "moved")


def test_no_source_is_replaced(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    for folder in (base, adapter):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ConfigError, match="is the source"):
            prepare_merge(stored(adapter), Checkpoint.open(base), folder, force=True)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_adapter_that_changes_meanwhile_leaves_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    prepared = prepare_merge(stored(adapter), Checkpoint.open(base), tmp_path / "out")
    with_config(adapter, lora_alpha=7)
    with pytest.raises(CheckpointError, match=r"adapter_config.json was replaced or changed"):
        prepared.run()
    assert not (tmp_path / "out").exists()


def spoiled(adapter: Path, value: float) -> Path:
    """Puts a value into the last tensor of an adapter's file."""
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + np.float32(value).tobytes())
    return adapter


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(pair: tuple[Path, Path], tmp_path: Path, value: float) -> None:
    base, adapter = pair
    with pytest.raises(CheckpointError, match=r"model.layers.2.self_attn.q_proj.lora_B.weight holds NaN or an inf"):
        prepare_merge(stored(spoiled(adapter, value)), Checkpoint.open(base), tmp_path / "out")
    assert not (tmp_path / "out").exists()
