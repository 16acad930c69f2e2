"""What runs while modules are built under `on_meta`: operators on real memory, and the places of random numbers."""

import resource

import pytest
import torch
from torch import nn

from tk.core.errors import ConfigError
from tk.train import initialize, on_meta


def test_what_code_itself_puts_on_the_meta_device_stays_there() -> None:
    """As in transformers' from_pretrained, which gives values to what it put there."""
    with on_meta():
        with torch.device("meta"):
            module = nn.BatchNorm1d(3)
        linear = nn.Linear(2, 2, device="meta")
        moved = torch.ones(3).to("meta")
        assert module.get_buffer("running_mean").is_meta
        assert linear.weight.device.type == moved.device.type == "meta"
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    with pytest.raises(ConfigError, match="weight is on the meta device and has no values"):
        initialize(module)


def test_operators_that_cannot_run_without_memory_get_values() -> None:
    """Householder reflections; torch takes the error of such an operator for a missing method, and goes on."""
    torch.manual_seed(0)
    ordinary = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    torch.manual_seed(0)
    with on_meta():
        module = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
    assert {name for name, _ in module.named_buffers()} == {"parametrizations.weight.0.base"}
    for one, other in zip(ordinary.buffers(), module.buffers(), strict=True):
        assert torch.equal(one, other)


def test_the_generator_is_given_back() -> None:
    """Without numbers for others than parameters it stands where it stood."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with on_meta():
        nn.Linear(3, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_values_that_numpy_wrote_are_kept() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.empty(3)
            values.numpy()[:] = 7
            self.weight = nn.Parameter(values)
            self.other = nn.Parameter(torch.from_numpy(values.numpy()) + 1)

    with on_meta():
        module = Written()
    initialize(module)
    assert module.weight.tolist() == [7, 7, 7]
    assert module.other.tolist() == [8, 8, 8]


def test_a_parameter_that_is_registered_first_takes_no_memory() -> None:
    """2 GiB, initialised by the layer and again from outside."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with on_meta():
        module = nn.Linear(2**14, 2**15, bias=False)
        nn.init.normal_(module.weight)
    assert module.weight.nbytes == 2**31
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


class Forward(nn.Module):
    """It runs a layer while it is built, with statistics that an operator changes though it does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("seen", self.norm(self.linear(torch.randn(5, 3))).detach())
        self.linear.bias.data = torch.ones(3)


def test_a_forward_pass_in_the_construction() -> None:
    torch.manual_seed(0)
    ordinary = Forward()
    torch.manual_seed(0)
    with on_meta():
        module = Forward()
    for name, buffer in ordinary.named_buffers():
        assert torch.equal(buffer, module.get_buffer(name)), name
    initialize(module)
    assert module.linear.bias.tolist() == [1, 1, 1]
    assert torch.equal(module.linear.weight, ordinary.linear.weight)
    with pytest.raises(ConfigError, match="outside of autocast"), on_meta(), torch.autocast("cpu"):
        Forward()


def test_memory_that_a_module_keeps_beside_a_parameter_is_brought_up_to_date() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.zeros(3)
            self.weight = nn.Parameter(values)
            nn.init.ones_(self.weight)
            self.register_buffer("copy", values * 2)

    with on_meta():
        module = Kept()
    assert module.get_buffer("copy").tolist() == [2, 2, 2]
