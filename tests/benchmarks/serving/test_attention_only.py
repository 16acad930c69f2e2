"""The cache whose attention is measured alone, and the readers that walk its pages."""

import numpy as np
import pytest

from tk.benchmarks.serving.attention_limits import CoreLimits, page_readers
from tk.benchmarks.serving.attention_only import BLOCK, HEAD_DIM, KV_HEADS, AttentionOnly
from tk.infer.engine.kernels.native.binding.library import instruction_sets, load_kernels

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")


def test_readers_read_each_page_that_a_step_of_decoding_reads() -> None:
    kernels = load_kernels(instruction_sets()[-1])
    assert kernels is not None
    made = AttentionOnly(kernels, "bf16", 2, 3, 70, 64)
    made.fill(65)
    pieces, piece_bytes = made.pieces(65)
    assert piece_bytes == 2 * KV_HEADS * BLOCK * HEAD_DIM * 2
    assert len(pieces) == len(set(pieces.tolist())) == 2 * 3 * 3  # layers, sequences, blocks
    plain, prefetching = page_readers(pieces, piece_bytes, 1).values()
    assert plain() == prefetching() != 0
    assert page_readers(pieces[:1], piece_bytes, 1)["plain reader"]() != plain()
    made.attend(64, 1)
    made.close()


def test_the_ceiling_of_exp_adds_its_time_to_that_of_products() -> None:
    found = CoreLimits(weight_seconds=1e-9, floats=256e9, integers=512e9)
    assert np.isclose(found.ceiling(found.floats, 64), 128e9)
