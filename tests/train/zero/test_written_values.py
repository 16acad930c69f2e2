"""Elements that a user wrote reach the masters; all others keep their digits, however chunks and words are cut."""

import pytest
import torch

from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.train.zero import written_values
from tk.train.zero.written_values import take_written


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("start", "length"), [(0, 8), (1, 7), (3, 2**18 + 5), (0, 0)])
def test_only_written_elements_are_taken(dtype: torch.dtype, start: int, length: int) -> None:
    torch.manual_seed(0)
    master = torch.randn(start + length)[start:]
    before = master.clone()
    parameters = torch.zeros(start + length, dtype=dtype)[start:].copy_(master)
    take_written(master, parameters)
    assert torch.equal(master, before), "nothing was written"
    places = [place for place in (0, length // 2, length - 1) if length]
    parameters[places] = torch.tensor([0.1, torch.inf, -0.0][: len(places)]).to(dtype)
    take_written(master, parameters)
    expected = before.clone()
    expected[places] = parameters[places].float()
    assert torch.equal(master.view(torch.int32), expected.view(torch.int32))


def test_a_gpu_takes_them_without_telling_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_values, "_CHUNK_ON_GPU", 100)
    torch.manual_seed(0)
    master, odd = torch.randn(257), torch.tensor([1.5, -0.0, torch.inf])
    parameters = master.bfloat16()
    parameters[[3, 100, 256]] = odd.bfloat16()
    expected = master.clone()
    expected[[3, 100, 256]] = odd
    with pretend_gpu() as gpu:
        there, written = master.to(GPU), parameters.to(GPU)
        gpu.waits.clear()
        take_written(there, written)
        assert gpu.waits == []
        found = there.to("cpu")
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_parameters_that_are_their_own_masters_stay() -> None:
    values = torch.ones(4)
    take_written(values, values)
    assert torch.equal(values, torch.ones(4))
