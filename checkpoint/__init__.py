"""The checkpoint format: writing, reading, resharding, exporting and checking it. No torch, no model, no processes."""

from .commit import commit
from .diff import compare
from .export import export_links, prepare_export
from .reader import Checkpoint, StoredArray
from .reshard import Options, prepare_reshard, reshard
from .run_folder import LockedRun, RunFolder
from .writer import write_part

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
