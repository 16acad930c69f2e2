"""The identity of a model's weights, which any layout of them has: an adapter names its base by it.

It is the SHA-256 over the lines "NAME DTYPE SHAPE SHA-256" of all weights in sorted order, where the last is that of
the weight's logical bytes. To compute it every byte is read, so the result is kept for the next time, under the
checkpoint's fingerprint: the digest of a step's manifest, or the sizes, times and inodes of a folder without one. A
copy with the same values has the same identity, so one that is known is kept for the copy, too.
"""

import hashlib
import logging
import os
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from ...core.dtypes import DType
from ...core.geometry import Box
from ..format.region import as_bytes
from ..read.reader import Checkpoint

_ELEMENTS: Final = 2**23  # that are read at once, by each of the threads
_THREADS: Final = 4

_log = logging.getLogger(__name__)


def weights_identity(checkpoint: Checkpoint, names: Sequence[str]) -> str:
    """Returns the identity of the weights of these names, which is kept or computed.

    Args:
        checkpoint: the checkpoint of the model.
        names: the tensors of the model without those that are tied to another one.

    Raises:
        ShardMissing: the checkpoint has no such tensor.
        ShardCorrupt: stored bytes do not match their checksum.
    """
    wanted = sorted(names)
    kept = _kept_in(checkpoint, wanted)
    found = _read(kept)
    if not found:
        _log.info("reading all weights of %s once, for its identity", checkpoint.path)
        found = _computed(checkpoint, wanted)
        _keep(kept, found)
    return found


def carry_identity(source: Checkpoint, path: Path, names: Iterable[str]) -> None:
    """Keeps the identity of a checkpoint for a copy of it, if it is known.

    A copy whose weights have other dtypes has another identity, so none is kept for it.

    Args:
        source: the checkpoint.
        path: the copy, which has the values of `source`.
        names: the copy's tensors.
    """
    wanted = sorted(names)
    found = _read(_kept_in(source, wanted))
    if not found:
        return
    copy = Checkpoint.open(path)
    if all(_dtype(source, name) == _dtype(copy, name) for name in wanted):
        _keep(_kept_in(copy, wanted), found)


def _dtype(checkpoint: Checkpoint, name: str) -> DType:
    return checkpoint.resolve(name, "weight", None)[2]


def _computed(checkpoint: Checkpoint, names: Sequence[str]) -> str:
    with ThreadPoolExecutor(_THREADS) as pool:
        lines = list(pool.map(lambda name: _line(checkpoint, name), names))
    checkpoint.folder.require_unchanged()
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _line(checkpoint: Checkpoint, name: str) -> str:
    stored, _, dtype = checkpoint.resolve(name, "weight", None)
    shape = checkpoint.tensors[stored].shape
    digest, size = hashlib.sha256(), Box.whole(shape).size
    for begin in range(0, size, _ELEMENTS):
        part = checkpoint.read(name, flat=(begin, min(begin + _ELEMENTS, size)))
        digest.update(as_bytes(part.values))
    return f"{name} {dtype.code} {'x'.join(map(str, shape))} {digest.hexdigest()}\n"


def _kept_in(checkpoint: Checkpoint, names: Sequence[str]) -> Path | None:
    """Returns the file that keeps the identity; None if this user has no folder for it."""
    cache, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    folder = cache if os.path.isabs(cache) else os.path.join(home, ".cache")
    if not os.path.isabs(folder):
        return None
    of = hashlib.sha256("\n".join([checkpoint.folder.fingerprint, *names]).encode()).hexdigest()
    return Path(folder, "tk", "identities", of)


def _read(path: Path | None) -> str:
    try:
        text = path.read_text(encoding="ascii") if path else ""
    except (OSError, UnicodeDecodeError):
        return ""
    return text if re.fullmatch(r"[0-9a-f]{64}", text) else ""


def _keep(path: Path | None, identity: str) -> None:
    if path is None:
        return
    own = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(identity, encoding="ascii")
        own.replace(path)
    except OSError as error:
        _log.info("%s is not written (%s): the next run reads all weights again", path, error)
