"""Folders of libraries that are built ahead, for images whose machines have no compiler ($TK_KERNELS)."""

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import ConfigError
from .build import Say
from .library_folder import LibraryFolder
from .load import build_into
from .record import LibraryRecord
from .source import NativeSource
from .trust import Untrusted


def fill_folder(sources: Sequence[NativeSource], path: Path, on_progress: Say) -> Iterator[tuple[Path, LibraryRecord]]:
    """Builds libraries into a folder that $TK_KERNELS can name, for any user; yields each with its record.

    The folder is made if it is missing. Libraries of the same sources that are there are replaced.

    Raises:
        BuildFailed: a library cannot be built on this machine.
        ConfigError: the folder cannot be made or written, or others may write it, so that no library is loaded from it.
    """
    machine = platform.machine()
    folder = LibraryFolder(Path(os.path.realpath(path)), frozenset({0, os.geteuid()}))
    try:
        if not folder.path.exists():
            folder.path.mkdir(parents=True)
            folder.path.chmod(0o755)  # whatever the umask: the image's user reads it
        for source in sources:
            if not source.units_for(machine):
                continue
            with folder.locked():
                build_into(folder, source, machine, on_progress)
            stem = source.stem(machine)
            record = folder.record(stem)
            if record is None:
                raise Untrusted(f"{folder.path / stem}.so disappeared after it was built.")
            yield folder.path / f"{stem}.so", record
    except (Untrusted, OSError) as error:
        raise ConfigError(f"{path} cannot hold native libraries: {error}") from error
