"""The model of tiles keeps to its own times, on assembly whose answer is known by hand."""

import pytest

from tk.benchmarks.tile_model import cycles, inner_loops, parts

TILES = [f"tdpbf16ps\t%tmm6, %tmm4, %tmm{i}" for i in range(4)]


@pytest.mark.parametrize(("count", "expected"), [(1, 52), (2, 52), (3, 52), (4, 64)])
def test_sums_wait_for_their_own_chain_or_for_the_tiles(count: int, expected: int) -> None:
    assert cycles([(line, 16) for line in TILES[:count]], 1, 40) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("line", "rows", "expected"),
    [
        ("tileloadd\t(%rax,%rbx,1), %tmm6", 8, 8),  # weights have 16 lines, whatever the rows
        ("tileloadd\t(%rax,%rbx,1), %tmm4", 8, 4),
        ("tilestored\t%tmm0, (%rax)", 16, 16),
        ("vmovaps\t%zmm0, -64(%rdi)", 16, 1),
        ("vaddps\t%zmm1, %zmm2, %zmm3", 16, 0.5),
        ("vpsrld\t$16, %zmm0, %zmm1", 16, 1),
        ("vfmadd231ps\t(%rax), %zmm1, %zmm0", 16, 4),  # a chain: what it waits for is the sum
    ],
)
def test_an_instruction_keeps_its_ports(line: str, rows: int, expected: float) -> None:
    assert cycles([(line, rows)], 0.5, 60) == pytest.approx(expected, abs=0.1)


def test_a_store_of_a_tile_counts_as_two_operations_per_line() -> None:
    assert parts("tilestored\t%tmm0, (%rax)", 16, 1)[1] == 32
    assert parts("tilestored\t%tmm0, (%rax)", 16, 0.5)[1] == 16


def test_tiles_that_lie_further_away_than_the_window_do_not_overlap_with_vectors() -> None:
    vector = "vaddps\t%zmm1, %zmm2, %zmm3"
    near = [line for tile in TILES * 8 for line in (tile, *[vector] * 32)]
    far = [*TILES * 8, *[vector] * 1024]
    assert cycles([(line, 16) for line in near], 1, 2) < 1.1 * 512
    assert cycles([(line, 16) for line in far], 1, 2) > 1.15 * 512


def test_loops_that_contain_no_other_are_found_without_jumps() -> None:
    inner = [".L2:", "\tvaddps\t%zmm1, %zmm2, %zmm3", "\tjne\t.L2"]
    lines = ["f:", ".L1:", "\tnop", *inner, "\tsubq\t$1, %rax", "\tjne\t.L1", "\t.size\tf, .-f"]
    assert list(inner_loops(lines, "f")) == [["vaddps\t%zmm1, %zmm2, %zmm3"]]
