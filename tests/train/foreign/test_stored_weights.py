"""`initialize(..., weights=FOLDER)`: the values of a checkpoint, for modules with and without memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from tk.core.errors import CheckpointError, ConfigError, ShapeMismatch
from tk.tests.rank_pool import RankPool
from tk.tests.train.foreign.foreign_modules import SUBJECTS
from tk.train import initialize, on_meta

QUICK = ("Llama, tied", "LSTM", "parametrizations, reassigned buffer")
CHOICES: Any = [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in SUBJECTS]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _make(name: str, dtype: torch.dtype, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = SUBJECTS[name].make()
    return module.to(dtype) if SUBJECTS[name].one_dtype else module


def _store(module: nn.Module, folder: Path, without: tuple[str, ...] = ()) -> Path:
    """Writes the module's state_dict as a Hugging Face folder has it: one name of each tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    first = {id(tensor): name for name, tensor in reversed(module.state_dict(keep_vars=True).items())}
    state = {name: tensor for name, tensor in module.state_dict().items() if name in first.values()}
    save_file({name: state[name].contiguous() for name in state if name not in without}, folder / "model.safetensors")
    return folder


def loaded(name: str, folder: str, zero: Any, precision: Any, meta: bool) -> dict[str, list[float]]:
    """Returns the sums and the last values of all tensors of a module that this rank loads."""
    torch.set_num_threads(1)
    if meta:
        with on_meta():
            module = _make(name, DTYPES[precision], 7)
    else:
        module = _make(name, DTYPES[precision], 7)
    engine = initialize(module, weights=folder, zero=zero, precision=precision, bucket_size=3000)
    return {key: _figures(value) for key, value in engine.state_dict().items()}


def _figures(value: torch.Tensor) -> list[float]:
    flat = value.double().reshape(-1)
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64).sqrt()
    return [float(flat.sum()), float((flat * weights).sum()), float(flat[-1])]


@pytest.mark.parametrize("name", CHOICES)
def test_every_rank_has_the_stored_values(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    """Of modules built on meta and as always, on two ranks, at all stages and precisions in turn."""
    number = list(SUBJECTS).index(name)
    for turn in range(2):
        zero, precision = (3, 1, 2, 0)[(number + turn) % 4], ("fp32", "bf16", "fp16")[(number + turn) % 3]
        there = _make(name, DTYPES[precision], 3)
        folder = _store(there, tmp_path / str(turn))
        learns = {id(parameter) for parameter in there.parameters()}
        expected = {
            key: _figures(value.detach().to(DTYPES[precision]) if id(value) in learns else value)
            for key, value in there.state_dict(keep_vars=True).items()
        }
        arguments = {"name": name, "folder": str(folder), "zero": zero, "precision": precision, "meta": turn == 0}
        assert rank_pool.run(loaded, 2, **arguments) == [expected, expected]


def test_a_folder_of_transformers_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    there = SUBJECTS["Llama, tied"].make()
    assert isinstance(there, transformers.PreTrainedModel)
    there.save_pretrained(tmp_path, max_shard_size="4KB")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with on_meta():
        module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    engine = initialize(module, weights=tmp_path, zero=3)
    batch = SUBJECTS["Llama, tied"].batch(0)
    assert engine(batch).detach() == expected(**batch).loss.detach()


def test_a_step_of_ours_is_read_with_all_digits_of_its_masters(tmp_path: Path) -> None:
    x = torch.ones(2, 6)
    engine = initialize(_make("nn.Sequential", torch.float32, 0), {"lr": 1e-3}, precision="bf16")
    engine.backward(engine(x.bfloat16()).float().square().mean())
    engine.step()
    engine.save(tmp_path / "run", wait=True)
    with on_meta():
        module = _make("nn.Sequential", torch.float32, 1)
    again = initialize(module, weights=tmp_path / "run", zero=3, precision="bf16")
    for one, two in zip(_masters(engine), _masters(again), strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, one.bfloat16().float())


def _masters(engine: Any) -> list[torch.Tensor]:
    runs = sorted(engine._training.optimizer.runs("master"), key=lambda run: run[0].piece.tensor.name)
    return [values for _, values in runs]


def test_names_of_tied_tensors_buffers_that_lack_and_buffers_that_are_computed(tmp_path: Path) -> None:
    """A folder may have another name of a tied tensor, no running statistics, and tables that modules compute."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("table", torch.arange(3.0), persistent=False)

    stored = {"head.weight": torch.rand(5, 3), "norm.weight": torch.rand(3), "norm.bias": torch.rand(3)}
    stored |= {"norm.running_mean": torch.rand(3), "table": torch.ones(3)}
    save_file(stored, tmp_path / "model.safetensors")
    module = Tied()
    initialize(module, weights=tmp_path)
    assert torch.equal(module.embed.weight, stored["head.weight"])
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.norm.get_buffer("running_mean"), stored["norm.running_mean"])
    assert module.norm.get_buffer("running_var").tolist() == [1, 1, 1]
    assert module.get_buffer("table").tolist() == [0, 1, 2]
    save_file(stored | {"embed.weight": torch.rand(5, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ShapeMismatch, match=r"other values in head.weight than in embed.weight"):
        initialize(Tied(), weights=tmp_path)


WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "missing": (lambda state: {"0.weight": state["0.weight"]}, r"lacks 0.bias, 2.weight, 2.bias and 4 more"),
    "left over": (lambda state: state | {"more": torch.ones(1)}, r"has, beside the module's tensors, more\."),
    "shape": (
        lambda state: state | {"0.weight": torch.ones(2, 3)},
        r"0.weight in shape \[2, 3\], where the module's is \[12, 6\]",
    ),
    "kind": (lambda state: state | {"0.bias": torch.ones(12, dtype=torch.int64)}, "0.bias as I64, where .* is F32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_that_do_not_fit_are_named_before_anything_is_changed(tmp_path: Path, case: str) -> None:
    change, message = WRONG[case]
    module = _make("nn.Sequential", torch.float32, 0)
    save_file(change(module.state_dict()), tmp_path / "model.safetensors")
    before = {name: (tensor, tensor.dtype) for name, tensor in module.named_parameters()}
    with pytest.raises(ShapeMismatch, match=message):
        initialize(module, weights=tmp_path, precision="bf16")
    for name, tensor in module.named_parameters():
        assert before[name][0] is tensor
        assert before[name][1] == tensor.dtype
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        initialize(module, weights=tmp_path / "..")


def test_any_module_on_the_meta_device_is_filled_unless_its_buffers_have_no_values(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    folder = _store(module, tmp_path)
    for absent in (nn.Linear(2, 3, device="meta"), nn.Linear(2, 3)):
        there = nn.Sequential(absent, nn.BatchNorm1d(3))
        initialize(there, weights=folder)
        assert torch.equal(there[0].get_parameter("weight"), module[0].get_parameter("weight"))
    with torch.device("meta"):
        hollow = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match=r"1.running_mean is on the meta device.*tk.train.on_meta"):
        initialize(hollow, weights=folder)


def test_stored_values_that_fp16_cannot_hold_are_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, 1e5)
    _store(module, tmp_path)
    with pytest.raises(ConfigError, match="weight has values beyond fp16's largest, 65504"):
        initialize(nn.Linear(2, 2), weights=tmp_path, precision="fp16")
