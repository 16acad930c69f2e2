"""Reads of whole small files that a user names: one that does not end, as a device or a pipe, fills no memory."""

import errno
import os
from pathlib import Path
from typing import Final

LIMIT: Final = 64 << 20  # bytes; the files that are read so have a few KiB


def read_given(path: Path, limit: int = LIMIT) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: it cannot be read, or has more bytes than `limit`.
    """
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}, more than {limit >> 20} MiB", str(path))
    return content


def read_given_text(path: Path, limit: int = LIMIT) -> str:
    r"""Returns the text of a file in UTF-8; its lines end with \n, whatever ends them there.

    Raises:
        OSError: as in `read_given`.
        UnicodeDecodeError: it is no text in UTF-8.
    """
    return read_given(path, limit).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
