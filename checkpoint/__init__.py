"""The checkpoint: writing, reading, resharding, exporting and checking it. No torch and no model.

Its folders are floors, and each imports only those before it: `files` (the disk), `format` (the bytes as plain data),
`read` (opens, reads and checks a checkpoint), `run` (a run's steps and its lock), `save` (writes and commits a step, in
the rank's process or in a process of its own), `convert` (reshards, exports and compares).
"""

from typing import TYPE_CHECKING

from ..core.public_names import public_names

if TYPE_CHECKING:
    from .convert.diff import compare as compare
    from .convert.export import export_links as export_links
    from .convert.export import prepare_export as prepare_export
    from .convert.reshard import Options as Options
    from .convert.reshard import prepare_reshard as prepare_reshard
    from .convert.reshard import reshard as reshard
    from .read.reader import Checkpoint as Checkpoint
    from .read.stored_array import StoredArray as StoredArray
    from .run.locked_run import LockedRun as LockedRun
    from .run.run_folder import RunFolder as RunFolder
    from .save.commit import commit as commit
    from .save.new_step import NewStep as NewStep
    from .save.writer import write_part as write_part
else:
    __all__, __getattr__, __dir__ = public_names(
        __name__,
        {
            "Checkpoint": ".read.reader",
            "LockedRun": ".run.locked_run",
            "NewStep": ".save.new_step",
            "Options": ".convert.reshard",
            "RunFolder": ".run.run_folder",
            "StoredArray": ".read.stored_array",
            "commit": ".save.commit",
            "compare": ".convert.diff",
            "export_links": ".convert.export",
            "prepare_export": ".convert.export",
            "prepare_reshard": ".convert.reshard",
            "reshard": ".convert.reshard",
            "write_part": ".save.writer",
        },
    )
