"""What runs while modules are built under `on_meta`: operators on real memory, and the places of random numbers."""

import resource

import torch
from torch import nn

from tk.train import initialize, on_meta


def test_what_is_made_on_the_meta_device_has_values_too() -> None:
    """As in transformers' from_pretrained, whose tables of rotary frequencies have none until they are made again."""
    with on_meta(), torch.device("meta"):
        module = nn.BatchNorm1d(3)
        module.register_buffer("table", torch.arange(4) ** 0.5)
        module.half_done = nn.Linear(2, 2, device="meta")
    assert torch.equal(module.get_buffer("table"), torch.arange(4) ** 0.5)
    initialize(module)
    assert module.weight.tolist() == [1, 1, 1]
    assert module.running_var is not None
    assert module.running_var.tolist() == [1, 1, 1]


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
