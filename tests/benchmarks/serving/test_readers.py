"""The readers read every byte that they are given, and only these."""

import numpy as np

from tk.benchmarks.peers.token_clock import SpeedWorkload
from tk.benchmarks.serving.readers import read_loops, readers
from tk.infer.engine.kernels.native.binding.library import instruction_sets, load_kernels


def test_loops_add_up_every_word() -> None:
    loops = read_loops()
    assert set(loops) == {"plain loop", "prefetched loop"}
    words = np.random.default_rng(0).integers(0, 2**64, 3 * 4096 // 8 + 1, np.uint64, endpoint=False)
    for read in loops.values():
        for size in (0, 256, 3 * 4096):
            expected = int(words[: size // 8].sum(dtype=np.uint64)) * 3 % 2**64
            assert read(words.ctypes.data, size, 3) == expected
        assert read(words.ctypes.data, 256 + 8, 1) == read(words.ctypes.data, 256, 1)  # a part of an iteration


def test_all_three_readers_have_a_speed() -> None:
    kernels = load_kernels(instruction_sets()[-1])
    assert kernels is not None
    assert kernels.refusal() == b""  # by this it asks Linux for the tiles of AMX
    for threads in (1, 2):
        found = {one.name: one.run(SpeedWorkload(1, 1, 1)) for one in readers(kernels, threads, num_bytes=2**20)}
        assert set(found) == {"plain loop", "prefetched loop", "linear kernel"}
        assert all(speeds["read"] > 0 for speeds in found.values())
