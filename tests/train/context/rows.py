"""Rows of any documents, for property tests."""

from hypothesis import strategies as st

from tk.train.context.dealing import Dealing, deal


@st.composite
def documents_of(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    """Draws the lengths of documents that fill a row: () for one, or some of one kind and long ones between them."""
    if draw(st.booleans()):
        return ()
    common = draw(st.integers(1, max(1, length // 4)))
    documents: list[int] = []
    for size in draw(st.lists(st.integers(1, length), max_size=4)):
        documents += [common] * draw(st.integers(0, 5)) + [size]
    documents += [common] * (length // common + 1)
    filled, row = 0, []
    for size in documents:
        if filled < length:
            row.append(min(size, length - filled))
            filled += row[-1]
    return tuple(row)


@st.composite
def any_rows(draw: st.DrawFn) -> Dealing:
    """Draws a dealt micro-batch of short rows."""
    num_rows, length, cp = draw(st.integers(1, 3)), draw(st.integers(1, 150)), draw(st.integers(1, 5))
    documents = [draw(documents_of(length)) for _ in range(num_rows)]
    flat = tuple(size for row in documents for size in row or (length,)) if any(documents) else ()
    window = draw(st.none() | st.integers(1, 2 * length))
    return deal(num_rows, length, flat, [window], cp, draw(st.integers(1, 4)))
