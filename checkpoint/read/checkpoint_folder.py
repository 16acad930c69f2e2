"""The interface of a folder that holds a checkpoint, whichever program wrote it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, Protocol

from ..format.chunk import Part
from ..format.chunk_index import ChunkIndex
from ..format.manifest import FileDigest, Manifest


class CheckpointFolder(Protocol):
    """A folder that holds a checkpoint: a `StepFolder`, a `HuggingFaceFolder` or a `PeftFolder`."""

    @property
    def kind(self) -> Literal["tk", "huggingface", "peft"]:
        """The kind of the folder, for display."""

    @property
    def has_checksums(self) -> bool:
        """Whether its bytes have checksums, which can be checked and carried over to another checkpoint."""

    @property
    def has_splits(self) -> bool:
        """Whether its metadata records how tensor parallelism cuts each tensor."""

    @property
    def path(self) -> Path:
        """The folder's path."""

    @property
    def manifest(self) -> Manifest:
        """The metadata. For a Hugging Face folder it is made from the files' headers: step 0, one rank, no resume."""

    @property
    def digest(self) -> str:
        """The checkpoint's identity, a SHA-256."""

    @property
    def fingerprint(self) -> str:
        """A SHA-256 that another open of the same path finds too, unless a file was replaced or changed meanwhile."""

    @property
    def chunks(self) -> ChunkIndex:
        """The chunks of each (tensor, slot)."""

    @property
    def sealed_files(self) -> Mapping[str, FileDigest]:
        """The digests of the side files that may not change: those of the manifest, without documents for people."""

    @property
    def parts(self) -> Mapping[str, Part]:
        """The chunk tables of the writers by file name; a Hugging Face folder has none."""

    def check(self) -> None:
        """Reads all metadata: every part, the sizes of all files, and that each slot of each tensor is held once.

        Raises:
            CheckpointError: something is missing, damaged or contradicts itself; the message names it.
        """

    def end_lease(self) -> None:
        """Lets a run prune the folder from now on, although this object lives on: nothing more is read."""

    def require_unchanged(self) -> None:
        """Checks, after the last read, that all that was read belongs together and was not half overwritten.

        Raises:
            CheckpointError: the files have no checksums, and one was written or replaced since the folder was opened.
        """

    def data_path(self, file: str) -> Path:
        """Returns the path of a data file. Raises CheckpointError for a name or a link that leads elsewhere."""

    def open_data(self, file: str) -> int:
        """Opens a data file and returns its descriptor.

        Raises:
            CheckpointError: the file is not the one that the metadata describes; ShardCorrupt if it has another header.
        """

    def file_sizes(self) -> Mapping[str, int]:
        """Returns the size in bytes of each data file, by name."""

    def side_paths(self) -> Mapping[str, Path]:
        """Returns the paths of config, tokenizer and other small files, by name."""

    def read_side_files(self, names: Collection[str] | None = None) -> dict[str, bytes]:
        """Reads the side files (of `names`, if given, those that exist), checked if their digests are recorded."""

    def removable_files(self) -> set[str]:
        """Returns the files that may be removed when another checkpoint replaces the folder, relative to the folder."""

    def notes(self) -> list[str]:
        """Returns sentences about files that are not the checkpoint's, and do no harm."""

    def left_behind(self) -> list[str]:
        """Returns the names in the folder that a copy of the checkpoint does not take along, hidden ones excepted."""
