"""The entry point of a rank of the parity pool, `python -m tk.parity.rank`.

The slow imports happen in `_load`, after `serve` has tied the process's life to its parent's.
"""

from .rank_loop import Work, serve


def _load() -> Work:
    from .measure import Measurer

    return Measurer()


if __name__ == "__main__":
    serve(_load)
