"""The numbers of a step on their way to a device: values, types, addresses, and the number of copies."""

import numpy as np
import pytest
import torch

from tk.core.casts import Array
from tk.infer.engine.kernels.step_tensors import StepTensors, on_host
from tk.tests.pretend_gpu import GPU, pretend_gpu

ARRAYS: list[Array] = [
    np.arange(6, dtype=np.int64).reshape(2, 3),
    np.empty((0, 2), np.int32),
    np.array([1, 2, 3], np.int32),
    np.array([0.5, -1.5], np.float32),
    np.array([7], np.uint8),
    np.arange(10, dtype=np.int64),
]


def test_arrays_of_any_type_arrive_in_one_copy() -> None:
    with pretend_gpu() as gpu:
        tensors = StepTensors(GPU)
        for last in (5, 6):
            copies = len(gpu.copies)
            sent = [tensors.add(each, each.dtype.type) for each in ARRAYS[:last]]
            tensors.send()
            assert len(gpu.copies) == copies + 1
            assert not gpu.waits
            for each, values in zip(sent, ARRAYS, strict=False):
                assert each.tensor.device == GPU
                assert each.tensor.dtype == torch.from_numpy(values).dtype
                assert each.tensor.data_ptr() % 16 == 0
                np.testing.assert_array_equal(each.tensor.cpu().numpy(), values)
            gpu.waits.clear()


def test_the_same_shapes_have_the_same_addresses_in_each_step() -> None:
    with pretend_gpu():
        tensors, found = StepTensors(GPU), []
        for step in range(2):
            sent = [tensors.add([step, 2]), tensors.add([[step]], np.int32)]
            tensors.send()
            found.append([each.tensor.data_ptr() for each in sent])
            assert sent[0].tensor.tolist() == [step, 2]
        assert found[0] == found[1]
        large = tensors.add(np.arange(100_000))
        tensors.send()
        assert large.tensor.cpu().tolist() == list(range(100_000))


def test_the_host_may_write_its_arrays_while_they_are_sent() -> None:
    values = np.array([1, 2, 3])
    for device in (torch.device("cpu"), GPU):
        with pretend_gpu() as gpu:
            tensors = StepTensors(device)
            sent = tensors.add(values)
            tensors.send()
            values += 1
            gpu.memory.synchronize()
            assert sent.tensor.tolist() == (values - 1).tolist()


def test_numbers_are_read_only_after_they_are_sent() -> None:
    sent = StepTensors(torch.device("cpu")).add([1])
    with pytest.raises(AssertionError, match="sent before"):
        _ = sent.tensor


def test_a_device_sends_values_to_the_host_in_one_copy_that_is_awaited() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert on_host(values).tolist() == values.tolist()
    with pretend_gpu() as gpu:
        there = values.to(GPU)
        copies, gpu.waits[:] = len(gpu.copies), []
        assert on_host(there).tolist() == values.tolist()
        assert len(gpu.copies) == copies + 1
        assert len(gpu.waits) == 1
