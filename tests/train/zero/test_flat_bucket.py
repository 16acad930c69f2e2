"""One bucket at stage 3: its parameters come and go, and what a user writes into them stays."""

from dataclasses import replace

import pytest
import torch

from tk.core.errors import TkError
from tk.tests.train.zero.small_buffers import TABLE, make_buffers, make_module


def test_at_stage_3_parameters_are_gathered_and_freed_and_masters_are_fp32() -> None:
    module, plain = make_module(), make_module()
    buffers = make_buffers(module, zero=3, size=1, dtype=torch.bfloat16)
    first = buffers.buckets[1]
    assert first.own.read(0, 1).dtype == torch.float32
    with pytest.raises(TkError, match=r"The values of 0\.weight are spread over the ranks"):
        module.get_parameter("0.weight").sum()
    assert module.get_parameter("0.weight").shape == (9, 20)
    first.allocate()
    first.params.copy_(first.own.read(0, first.own.size))
    first.attach_params()
    assert torch.equal(module.get_parameter("0.weight"), plain.get_parameter("0.weight").bfloat16())
    with pytest.raises(TkError, match=r"1\.weight"):
        module.get_parameter("1.weight").sum()
    first.free()
    assert first.params.untyped_storage().size() == 0


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_into_gathered_parameters_stays_on_the_rank_that_holds_the_element(
    dtype: torch.dtype, frozen: bool
) -> None:
    for rank in range(2):
        module = make_module()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith("0.")))
        table = tuple(replace(spec, trainable=not (frozen and spec.layer == 0)) for spec in TABLE)
        buffers = make_buffers(module, zero=3, size=2, rank=rank, dtype=dtype, table=table)
        [bucket] = [bucket for bucket in buffers.all_buckets if bucket.plan.unit == 0]
        before = bucket.own.read(0, bucket.own.size).clone()
        assert before.dtype == (dtype if frozen else torch.float32)
        bucket.allocate()
        bucket.params[bucket.own_range].copy_(before)
        bucket.attach_params()
        with torch.no_grad():
            module.get_parameter("0.weight").view(-1)[:4] = 0.1  # elements of the first rank, in bf16 0.10009765625
        bucket.take_written()
        bucket.free()
        after = bucket.own.read(0, bucket.own.size)
        changed = slice(0, 4) if rank == 0 else slice(0, 0)
        assert torch.equal(after[changed], torch.full_like(after[changed], 0.1).to(dtype).to(after.dtype))
        after[changed] = before[changed]
        assert torch.equal(after, before), "masters of other elements keep their digits"
        with pytest.raises(TkError, match="spread over the ranks"):
            module.get_parameter("0.weight").sum()
