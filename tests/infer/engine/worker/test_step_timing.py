"""The steps that an engine measures before its first request."""

import pytest

from tk.infer.engine.schedule.waiting.admission import Limits
from tk.infer.engine.worker.step_timing import row_chunks, warm_up_chunks

LIMITS = Limits(8, 100, 512, 4096)


@pytest.mark.parametrize(("max_tokens", "num_blocks"), [(512, 128), (8, 2), (1, 1)])
def test_warm_up_steps_keep_the_limits(max_tokens: int, num_blocks: int) -> None:
    limits = Limits(1, 1, max_tokens, 64)
    for chunk in [*warm_up_chunks(limits, num_blocks, 8), *row_chunks(limits, num_blocks, 8)]:
        assert 1 <= chunk.length <= max_tokens
        num_tokens = chunk.sample.num_tokens + len(chunk.proposals)
        assert chunk.start + chunk.length == num_tokens <= min(64, num_blocks * 8)
        assert all(1 <= block <= num_blocks for block in chunk.sample.table.blocks)
        assert len(chunk.sample.table.blocks) * 8 >= num_tokens


def test_steps_of_rows_have_a_row_for_each_token() -> None:
    chunks = row_chunks(LIMITS, 128, 32)
    assert [chunk.length for chunk in chunks] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48]
    for chunk in chunks:
        assert chunk.is_last
        assert len(chunk.proposals) == chunk.length - 1


def test_every_block_that_a_warm_up_step_writes_has_a_twin_of_its_own() -> None:
    """If blocks have fewer twins: those without one would write to twin 0, which stays zero."""
    chunks = warm_up_chunks(LIMITS, 128, 32, num_twins=20) + row_chunks(LIMITS, 128, 32, num_twins=20)
    for chunk in chunks:
        blocks, twins = chunk.sample.table.twins[::2], chunk.sample.table.twins[1::2]
        written = {position // 32 for position in range(chunk.start, chunk.start + chunk.length)}
        assert blocks == [chunk.sample.table.blocks[i] for i in sorted(written)]
        assert twins == list(range(1, len(blocks) + 1))
        assert len(twins) <= 20
    assert not any(chunk.sample.table.twins for chunk in warm_up_chunks(LIMITS, 128, 32))
