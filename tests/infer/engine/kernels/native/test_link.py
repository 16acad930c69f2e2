"""Native kernels over several ranks: the bits of one rank in fp32, close to them in bf16."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.kernels.native.link import FileGather
from tk.tests.infer.engine.kernels.native.running import logits, rank_logits, runner
from tk.tests.model.architectures import ENTRIES, VOCAB

needs_compiler = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
TOKENS = np.random.default_rng(3).integers(0, VOCAB, 60).tolist()
CUTS = (1, 2, 20)


@pytest.mark.every(2)
@needs_compiler
@pytest.mark.parametrize(
    ("name", "tp"),
    [("llama3", 2), ("mixtral", 4), ("gpt2", 2), ("qwen3_moe", 4), ("qwen2_moe", 2), ("qwen2_moe", 8), ("qwen2", 8)],
)
def test_ranks_give_the_bits_of_one_rank_in_fp32(tmp_path: Path, name: str, tp: int) -> None:
    ENTRIES[name].make(tmp_path / "model")
    alone = runner(tmp_path / "model")
    expected = logits(alone, TOKENS, CUTS)
    alone.close()
    assert np.array_equal(rank_logits(tmp_path / "model", tp, tmp_path / "store", TOKENS, CUTS), expected)


@needs_compiler
def test_ranks_agree_in_bf16(tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path / "model")
    alone = runner(tmp_path / "model", "bf16", "bf16")
    expected = logits(alone, TOKENS, CUTS)
    alone.close()
    found = rank_logits(tmp_path / "model", 2, tmp_path / "store", TOKENS, CUTS, "bf16")
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.03 * np.abs(expected).max())


@needs_compiler
def test_head_rows_beyond_the_buffer_are_read_before_they_are_overwritten(tmp_path: Path) -> None:
    ENTRIES["gpt2"].make(tmp_path / "model")
    tokens = np.random.default_rng(4).integers(0, VOCAB, 300)
    tokens = tokens[: ENTRIES["gpt2"].make_config().n_positions].tolist()
    alone = runner(tmp_path / "model")
    expected = logits(alone, tokens, ())
    alone.close()
    for i in range(5):
        assert np.array_equal(rank_logits(tmp_path / "model", 2, tmp_path / f"store{i}", tokens, ()), expected)


def test_files_carry_the_bytes_of_every_rank(tmp_path: Path) -> None:
    def work(rank: int) -> list[list[bytes]]:
        gather = FileGather(str(tmp_path / "store"), rank, 3)
        return [gather(b"%d %d" % (rank, i)) for i in range(4)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    assert found == [[[b"%d %d" % (rank, i) for rank in range(3)] for i in range(4)]] * 3
