"""The argument block of the sampler in C: rows are read in place, results are aligned."""

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from tk.infer.engine.kernels.sampler import block as block_module
from tk.infer.engine.kernels.sampler.block import SamplingBatch, SamplingBlock, most_alternatives, results_bytes
from tk.infer.engine.step.sampling_rows import NO_LOGPROBS
from tk.infer.engine.step.slot_entries import TokenCounts
from tk.tests.infer.sampling_row import SamplingRow, pack

ROWS = pack(
    [
        SamplingRow(0, temperature=0.5, seed=2**63, bias={7: 1.0, 8: 2.0}),
        SamplingRow(1, num_top=3),
        SamplingRow(2, bias={9: 3.0}, counts=TokenCounts({4: 2})),
    ]
)


def test_options_and_the_starts_of_lists_are_filled_in() -> None:
    block = SamplingBlock(capacity=8, vocab=50)
    block.fill(ROWS)
    assert (block.batch.vocab, block.batch.masks) == (50, None)
    assert block.batch.temperature == ROWS.temperature.ctypes.data, "read in place"
    assert block.batch.address_of("logits") == ctypes.addressof(block.batch) + 4 * 8
    assert block._starts["bias_start"][:4].tolist() == [0, 2, 2, 3]
    assert block._starts["count_start"][:4].tolist() == [0, 0, 0, 1]
    assert block.batch.bias_token == ROWS.bias_token.ctypes.data


def test_rows_without_lists_end_those_of_the_rows_before() -> None:
    block = SamplingBlock(capacity=3, vocab=50)
    block.fill(ROWS, np.zeros((2, 2), np.uint32))
    assert (block.batch.mask_stride, bool(block.batch.masks)) == (2, True)
    block.fill(pack([SamplingRow(0)] * 3))
    assert block.batch.masks is None
    assert not block._starts["bias_start"].any()
    assert not block._starts["count_start"].any()


@pytest.mark.parametrize(("capacity", "top_width"), [(1, 20), (7, 0), (64, 5)])
def test_results_lie_in_given_memory_and_are_copied_out(capacity: int, top_width: int) -> None:
    memory = np.zeros(results_bytes(capacity, top_width), np.uint8)
    block = SamplingBlock(capacity, 50, top_width, memory)
    assert all(column.ctypes.data % column.itemsize == 0 for column in block._results.values())
    assert sum(column.nbytes for column in block._results.values()) == memory.nbytes
    block._results["token_ids"][:] = np.arange(capacity)
    assert memory.any() == (capacity > 1)
    found = block.output(capacity, top_width)
    assert found.token_ids.tolist() == list(range(capacity))
    assert found.top_ids.shape == (capacity, top_width)
    block._results["token_ids"][:] = -1
    assert found.token_ids.tolist() == list(range(capacity)), "a copy"


def test_only_the_requested_alternatives_are_returned() -> None:
    assert most_alternatives(ROWS) == 3
    assert most_alternatives(pack([SamplingRow(0, num_top=0)])) == 0
    for none in ([SamplingRow(0, num_top=NO_LOGPROBS)], []):
        assert most_alternatives(pack(none)) == NO_LOGPROBS
    block = SamplingBlock(3, 50)
    assert block.output(2, most_alternatives(ROWS)).top_logprobs.shape == (2, 3)


def test_c_has_the_columns_in_the_same_order() -> None:
    source = (Path(block_module.__file__).parent / "sampler.c").read_text()
    struct = source[source.index("typedef struct {") : source.index("} sampling_batch;")]
    code = re.sub(r"//.*", "", struct).partition("{")[2]
    names = re.findall(r"\*?(\w+)(?=[,;])", code)
    assert names == [name for name, *_ in SamplingBatch._fields_]
