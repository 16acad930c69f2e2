"""The errors that a user, a file or a client can cause.

    TkError                     exit 1   INTERNAL
    |- ConfigError              exit 2   INVALID_ARGUMENT      a wrong key or value in a config, or wrong usage
    |- ParallelError            exit 2   INVALID_ARGUMENT      a layout that does not fit the model or the world
    |- CheckpointError          exit 3   FAILED_PRECONDITION   a checkpoint that cannot be used
    |  |- DamagedCheckpoint                                    content that differs from what a save writes
    |  |  |- ManifestError                                     metadata that breaks the format's rules
    |  |  |- ShardMissing                                      a file or chunk that is listed and absent
    |  |  |- ShardCorrupt                                      bytes that do not match their checksum
    |  |  `- NotCommitted                                      a save that never finished
    |  `- ShapeMismatch                                        tensors that do not fit the model
    |- StorageError             exit 1   UNAVAILABLE           a file that the system failed to open, read or write
    |- RequestError             exit 2   INVALID_ARGUMENT
    |  |- InvalidRequest                                       a field with a value that cannot be served
    |  |- PromptTooLong                                        more tokens than the model or the cache can hold
    |  |- UnknownAdapter        exit 2   NOT_FOUND             a name that no loaded adapter has
    |  |- Cancelled             exit 1   CANCELLED             a request that its caller cancelled
    |  `- DeadlinePassed        exit 1   DEADLINE_EXCEEDED     a request that its deadline ended
    |- Overloaded               exit 1   RESOURCE_EXHAUSTED    a full queue; try again later
    `- WorkerDied               exit 1   UNAVAILABLE           a rank or worker process that ended or hangs
       `- WorkerStalled                                       one that hangs, and may go on

A message says what is wrong, where, and what would be right. It is for the caller, and may quote the request; so a
server's log has `log_form` instead. gRPC statuses are plain names here, so that this module does not import grpc.
`pack` and `unpack` carry an error from one process to another as JSON.
"""

import re
from collections.abc import Mapping, Sized
from copy import copy
from typing import Any, ClassVar, Self


class TkError(Exception):
    """The base of all errors that end a command with one readable paragraph.

    Attributes:
        exit_code: the exit status of the command line.
        grpc_status: the name of the gRPC status that the server answers with.
    """

    exit_code: ClassVar[int] = 1
    grpc_status: ClassVar[str] = "INTERNAL"

    @property
    def log_form(self) -> str:
        """The error in the log of a server, without its message, which may quote a caller."""
        return type(self).__name__


class ConfigError(TkError):
    """A configuration or command line that tk cannot carry out."""

    exit_code = 2
    grpc_status = "INVALID_ARGUMENT"


class ParallelError(TkError):
    """A parallel layout that does not fit the model, the batch or the number of ranks."""

    exit_code = 2
    grpc_status = "INVALID_ARGUMENT"


class CheckpointError(TkError):
    """A checkpoint that cannot be found, read or trusted."""

    exit_code = 3
    grpc_status = "FAILED_PRECONDITION"


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose content, as read or listed, differs from what a save writes.

    This is the only error after which a run resumes from an older step: any other error does not show that the newer
    step is damaged.
    """


class ManifestError(DamagedCheckpoint):
    """Checkpoint metadata that is malformed or contradicts itself."""


class ShardMissing(DamagedCheckpoint):
    """A file, tensor or chunk that the metadata lists and that is absent from the folder."""


class ShardCorrupt(DamagedCheckpoint):
    """Bytes that do not match their recorded checksum."""


class NotCommitted(DamagedCheckpoint):
    """A step folder whose save never finished."""


class ShapeMismatch(CheckpointError):
    """Stored tensors whose names or shapes differ from the model's."""


class StorageError(TkError, OSError):
    """A file or folder that the system failed to open, read, list, write, move or remove.

    The error says nothing about the stored content. It is an OSError too, for callers that distinguish values of
    `errno`.

    Args:
        message: the name of the file and the system's reason.
        number: the system's errno.
    """

    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number

    def __str__(self) -> str:
        """Returns the message; OSError would compose another one from `errno`."""
        return str(self.args[0])


class RequestError(TkError):
    """A request that the inference engine cannot carry out."""

    exit_code = 2
    grpc_status = "INVALID_ARGUMENT"


class InvalidRequest(RequestError):
    """A request field with a value that can never be served.

    Attributes:
        field: the wrong field ("top_p"), which a protocol has under a name of its own (see `renamed`); "" if several
            fields conflict. It may be a name that the caller made up.
        kind: the type and length of its value ("str of 12"); "" if they say nothing.

    Args:
        given: the value, of which the error keeps `kind` alone.
    """

    def __init__(self, message: str, field: str = "", given: object = None) -> None:
        super().__init__(message)
        self.field = field
        self.kind = "" if given is None else kind_of(given)

    def renamed(self, field: str) -> Self:
        """Returns the same error with another name of its field, in its message too, if that begins with the field."""
        found = copy(self)
        found.field = field
        place = rf"(^|The field is ){re.escape(self.field)}(?!\w)"
        found.args = (re.sub(place, lambda start: start[1] + field, str(self)) if self.field else str(self),)
        return found


class PromptTooLong(InvalidRequest):
    """A prompt that, with its new tokens, can never fit the model's length or the KV cache."""


class UnknownAdapter(RequestError):
    """A request for an adapter that is not loaded."""

    grpc_status = "NOT_FOUND"


class Cancelled(RequestError):
    """A request that its caller cancelled."""

    exit_code = 1
    grpc_status = "CANCELLED"


class DeadlinePassed(RequestError):
    """A request whose deadline has passed, or will pass before its first token."""

    exit_code = 1
    grpc_status = "DEADLINE_EXCEEDED"


class Overloaded(TkError):
    """A full queue. The same request may succeed later.

    Attributes:
        retry_after: the number of seconds after which the client should try again.
        subject: whose limit is reached: "queue", or "principal:" and the caller's name.
    """

    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after: float = 1.0, subject: str = "queue") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.subject = subject


class WorkerDied(TkError):
    """A training rank or an inference worker that exited or stopped answering.

    Attributes:
        retry_after: the number of seconds after which workers that start anew may answer; None if none start.
    """

    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WorkerStalled(WorkerDied):
    """An inference worker that is late with its answer and does not compute, but may go on: requests wait for it."""


def kind_of(value: object) -> str:
    """Returns the type of a value, and its length if it has one, as a log may name them: "str of 12", "int"."""
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, Sized) else name


def pack(error: TkError) -> dict[str, Any]:
    """Describes an error as plain data for another process of tk: names of its class and bases, message, attributes."""
    attributes = {name: value for name, value in vars(error).items() if not name.startswith("__")}
    if isinstance(error, OSError):
        attributes["errno"] = error.errno
    names = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, TkError)]
    return {"classes": names, "message": str(error), "attributes": attributes}


def unpack(data: Mapping[str, Any]) -> TkError:
    """Rebuilds the error that `pack` described, in its own class if this process has loaded it, else in the nearest
    base."""
    known = _loaded_classes()
    kind = next(known[name] for name in data["classes"] if name in known)
    error = kind.__new__(kind)  # not kind(...): constructors take different arguments, and only set attributes
    error.args = (data["message"],)
    for name, value in data["attributes"].items():
        setattr(error, name, value)
    return error


def _loaded_classes() -> dict[str, type[TkError]]:
    found: dict[str, type[TkError]] = {}
    ahead: list[type[TkError]] = [TkError]
    while ahead:
        kind = ahead.pop()
        found[kind.__name__] = kind
        ahead += kind.__subclasses__()
    return found
