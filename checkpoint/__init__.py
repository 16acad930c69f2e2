"""The checkpoint: writing, reading, resharding, exporting and checking it. No torch and no model."""

from .convert.diff import compare
from .convert.export import export_links, prepare_export
from .convert.reshard import Options, prepare_reshard, reshard
from .read.reader import Checkpoint, StoredArray
from .run.run_folder import LockedRun, RunFolder
from .save.commit import commit
from .save.writer import write_part

__all__ = [
    "Checkpoint",
    "LockedRun",
    "Options",
    "RunFolder",
    "StoredArray",
    "commit",
    "compare",
    "export_links",
    "prepare_export",
    "prepare_reshard",
    "reshard",
    "write_part",
]
