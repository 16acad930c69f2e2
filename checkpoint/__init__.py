"""The checkpoint: writing, reading, resharding, exporting and checking it. No torch and no model.

Its folders are floors, and each imports only those before it: `files` (the disk), `format` (the bytes as plain data),
`read` (opens, reads and checks a checkpoint), `run` (a run's steps and its lock), `save` (writes and commits a step, in
the rank's process or in a process of its own), `convert` (reshards, exports and compares).
"""

from .convert.diff import compare
from .convert.export import export_links, prepare_export
from .convert.reshard import Options, prepare_reshard, reshard
from .read.reader import Checkpoint
from .read.stored_array import StoredArray
from .run.locked_run import LockedRun
from .run.run_folder import RunFolder
from .save.commit import commit
from .save.new_step import NewStep
from .save.writer import write_part

__all__ = [
    "Checkpoint",
    "LockedRun",
    "NewStep",
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
