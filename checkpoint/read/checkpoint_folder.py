"""The one view of a folder that holds a checkpoint, for everything that does not care who wrote it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, Protocol

from ..format.chunk import Part
from ..format.chunk_index import ChunkIndex
from ..format.manifest import Manifest
from .report import Problem


class CheckpointFolder(Protocol):
    """A folder that holds a checkpoint: a `StepFolder` or a `HuggingFaceFolder`."""

    @property
    def kind(self) -> Literal["tk", "huggingface"]:
        """Its kind, for people to read."""

    @property
    def has_checksums(self) -> bool:
        """Whether its bytes can be checked, and their checksums carried over to another checkpoint."""

    @property
    def has_splits(self) -> bool:
        """Whether it says how tensor parallelism cuts its tensors."""

    @property
    def path(self) -> Path:
        """The folder."""

    @property
    def manifest(self) -> Manifest:
        """Its metadata; of a Hugging Face folder made from its files' headers: step 0, one rank, no resume state."""

    @property
    def digest(self) -> str:
        """The checkpoint's identity, a SHA-256."""

    @property
    def chunks(self) -> ChunkIndex:
        """By (tensor, slot), where its bytes are."""

    @property
    def parts(self) -> Mapping[str, Part]:
        """The chunk tables of its writers by file name; a Hugging Face folder has none."""

    def check(self) -> None:
        """Reads all metadata: every part, the sizes of all files, and that each slot of each tensor is held once.

        Raises:
            CheckpointError: something is missing, damaged or contradicts itself; the message names it.
        """

    def data_path(self, file: str) -> Path:
        """The path of one of its data files. Raises CheckpointError for a name or a link that leads elsewhere."""

    def open_data(self, file: str) -> int:
        """A descriptor of one of its data files; ShardCorrupt if its header is not the one that was written."""

    def file_sizes(self) -> Mapping[str, int]:
        """Bytes of each data file, by name."""

    def side_paths(self) -> Mapping[str, Path]:
        """The paths of config, tokenizer and other small files, by name."""

    def read_side_files(self, names: Collection[str] | None = None) -> dict[str, bytes]:
        """The small files beside the weights (of `names`, if given, those that exist), checked where it has digests."""

    def removable_files(self) -> set[str]:
        """The files that may go when the folder is replaced by another checkpoint, relative to it."""

    def find_unknown_files(self) -> tuple[list[Problem], list[str]]:
        """Files that `transformers` would load instead of the checkpoint's, or besides; and notes about others."""
