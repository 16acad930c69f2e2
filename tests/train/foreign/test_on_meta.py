"""Modules that are built without memory for parameters: all else is that of an ordinary construction, bit for bit."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import nn

from tk.core.errors import ConfigError
from tk.tests.rank_pool import RankPool
from tk.tests.train.foreign.foreign_modules import SUBJECTS
from tk.tests.train.foreign.random_module import Noisy, built_twice
from tk.train import initialize, on_meta

QUICK = ("Llama, tied", "Mamba", "LSTM", "ModuleDict, tied, frozen, padding_idx", "parametrizations, reassigned buffer")
CHOICES: Any = [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in SUBJECTS]


@pytest.mark.parametrize("name", CHOICES)
def test_buffers_and_first_values_are_those_of_an_ordinary_construction(name: str) -> None:
    """Rotary frequencies, position ids and the vectors of spectral_norm among them, saved or not."""
    subject, number = SUBJECTS[name], list(SUBJECTS).index(name)
    precision: Any = ("fp32", "bf16", "fp16")[number % 3]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    ordinary, absent = built_twice(lambda: subject.make().to(dtype) if subject.one_dtype else subject.make())
    assert {parameter.device.type for parameter in absent.parameters()} == {"meta"}
    buffers = dict(absent.named_buffers())
    for key, buffer in ordinary.named_buffers():
        assert torch.equal(buffer, buffers[key]), key
    assert len(buffers) == len(list(ordinary.buffers()))
    losses = []
    for module in (ordinary, absent):
        engine = initialize(module.train(), zero=(0, 3, 1, 2)[number % 4], precision=precision)
        with engine.full_parameters():
            losses.append({key: value.detach().clone() for key, value in module.state_dict().items()})
    assert losses[0].keys() == losses[1].keys()
    for key, value in losses[0].items():
        assert torch.equal(value, losses[1][key]), key


def test_models_of_auto_classes_compute_the_same() -> None:
    """Their rotary tables have values: elsewhere such models are loaded on meta with tables of zeros or noise."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(**sizes, **heads)
    ordinary, absent = built_twice(lambda: transformers.AutoModelForCausalLM.from_config(config))
    engine = initialize(absent, zero=3)
    tokens = torch.arange(6).view(1, 6)
    loss = engine({"input_ids": tokens, "labels": tokens})
    assert loss.detach() == ordinary(input_ids=tokens, labels=tokens).loss.detach()


def test_a_parameter_stays_one_object_for_all_who_hold_it() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kept = nn.Parameter(torch.ones(2))
            kept.tag = "mine"  # type: ignore[attr-defined]
            self.pair = [kept]
            self.one = self.two = kept

    with on_meta():
        module = Listed()
    assert module.one is module.two is module.pair[0]
    engine = initialize(module)
    with engine.full_parameters():
        assert module.pair[0] is module.one
        assert module.pair[0].tolist() == [1, 1]
        assert module.one.tag == "mine"  # type: ignore[attr-defined]


@pytest.mark.parametrize("stored", [False, True])
def test_first_values_are_the_same_wherever_states_are(tmp_path: Path, stored: bool) -> None:
    torch.manual_seed(0)
    ordinary = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    save_file(ordinary.state_dict(), tmp_path / "model.safetensors")
    for place in ("none", "cpu", "disk"):
        torch.manual_seed(int(stored))
        with on_meta():
            module = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        offload = {"optimizer": place, "gradients": place, "parameters": place, "folder": str(tmp_path)}
        weights = tmp_path if stored else None
        engine = initialize(module, zero=3, precision="bf16", offload=offload, weights=weights)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, ordinary.state_dict()[name].bfloat16()), (place, name)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(3)


class Used(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        late = nn.Parameter(torch.ones(2))
        self.loss = (late * late).sum()
        self.late = late


class Shares(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("view", self.weight.data[0])


class Takes(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.detach().numpy()


class Mixes(nn.Linear):
    def __init__(self, other: torch.Tensor) -> None:
        super().__init__(2, 2)
        with torch.no_grad():
            self.weight.copy_(other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Lazy, "LazyLinear.weight has no shape before a first batch.*outside of on_meta"),
        (Used, r"Used.late was used in a computation.*Register it first"),
        (Shares, r"The buffer Shares.view lies in the memory of the parameter Shares.weight"),
        (Takes, r"numpy.*outside of on_meta .Takes.bias was registered last"),
        (
            partial(Mixes, torch.empty(2, 2, device="meta")),
            "aten.copy_.default joins a parameter with a tensor that was",
        ),
    ],
)
def test_refused_by_name_and_everything_is_put_back(make: Callable[[], nn.Module], message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=message), on_meta():
        make()
    assert torch.equal(torch.get_rng_state(), before)
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_list_of_tensors_without_values_is_refused_by_name() -> None:
    class Lists(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.powers = [self.weight.detach() ** 2]

    with on_meta():
        module = nn.Sequential(Lists())
    with pytest.raises(ConfigError, match=r"0 .Lists. holds in powers a tensor that it computed from a parameter"):
        initialize(module)


def test_first_values_that_fp16_cannot_hold_are_refused() -> None:
    with on_meta():
        module = nn.Linear(2, 2)
        nn.init.constant_(module.bias, 1e5)
    with pytest.raises(ConfigError, match="bias begins with values beyond fp16's largest, 65504"):
        initialize(module, precision="fp16")


def test_blocks_may_be_nested_and_other_threads_build_as_always() -> None:
    devices: list[str] = []
    with on_meta():
        with on_meta():
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
        thread = threading.Thread(target=lambda: devices.append(nn.Linear(2, 2).weight.device.type))
        thread.start()
        thread.join()
        with pytest.raises(ConfigError, match=r"initialize was called inside of `with tk.train.on_meta"):
            initialize(outer)
    assert devices == ["cpu"]
    assert inner.weight.is_meta
    assert outer.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_threads_that_build_at_the_same_time_do_not_disturb_each_other() -> None:
    """A hook that one adds while another one builds ended that other's construction."""
    kinds: set[str] = set()
    done: list[int] = []

    def build(absent: bool) -> None:
        for _ in range(20):
            with on_meta() if absent else nullcontext():
                module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(10)))
            kinds.update(f"{absent} {parameter.device.type}" for parameter in module.parameters())
        done.append(1)

    threads = [threading.Thread(target=build, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4
    assert kinds == {"True meta", "False cpu"}


def seeded(zero: Any) -> list[float]:
    """Returns this rank's view of the first values, of a module that each rank builds with another seed."""
    torch.manual_seed(dist.get_rank())
    with on_meta():
        module = nn.Sequential(nn.Linear(3, 3), Noisy(), nn.Linear(3, 3).requires_grad_(False))
    engine = initialize(module, zero=zero)
    return [float(value.double().sum()) for value in engine.state_dict().values()]


@pytest.mark.parametrize("zero", [2, 3])
def test_every_rank_gets_rank_0s_values(rank_pool: RankPool, zero: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), Noisy(), nn.Linear(3, 3))
    expected = [float(value.double().sum()) for value in module.state_dict().values()]
    assert rank_pool.run(seeded, 2, zero=zero) == [expected, expected]
