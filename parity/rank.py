"""The entry of a rank of the parity pool, `python -m tk.parity.rank`.

Tied to its starter before it loads anything that takes time.
"""

from .rank_loop import Work, serve


def _load() -> Work:
    from .measure import Measurer

    return Measurer()


if __name__ == "__main__":
    serve(_load)
