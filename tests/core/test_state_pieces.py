"""Pieces of ranges in a file: they cover every element once, on pages of their own."""

from hypothesis import given
from hypothesis import strategies as st

from tk.core.state_pieces import PAGE, cut
from tk.tests.example_counts import examples

ITEMSIZES = st.dictionaries(st.sampled_from(["master", "exp_avg", "exp_avg_sq"]), st.sampled_from([2, 4]), min_size=1)


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 9000), ITEMSIZES), max_size=5), st.integers(1, 5000))
def test_pieces_cover_all_ranges_once_and_share_no_page(ranges: list[tuple[int, dict[str, int]]], most: int) -> None:
    sizes, itemsizes = [size for size, _ in ranges], [slots for _, slots in ranges]
    pieces = cut(sizes, itemsizes, most)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    elements = [(piece.bucket, element) for piece in pieces for element in range(piece.begin, piece.end)]
    assert elements == [(bucket, element) for bucket, size in enumerate(sizes) for element in range(size)]
    taken: set[int] = set()
    for piece in pieces:
        assert 0 < piece.end - piece.begin <= most
        assert set(piece.slots) == set(itemsizes[piece.bucket])
        for slot, itemsize in itemsizes[piece.bucket].items():
            begin = piece.place + piece.slots[slot]
            assert begin % PAGE == 0
            pages = set(range(begin // PAGE, (begin + (piece.end - piece.begin) * itemsize - 1) // PAGE + 1))
            assert not pages & taken
            taken |= pages
            assert begin + (piece.end - piece.begin) * itemsize <= piece.place + piece.nbytes
    assert sum(piece.nbytes for piece in pieces) == PAGE * (max(taken, default=-1) + 1)
