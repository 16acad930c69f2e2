"""Refusals that only a server makes; the engine's own are in core/errors.py.

TkError
|- RequestError
|  |- NotBuilt            UNIMPLEMENTED        a field or call that this version knows and cannot carry out
|  |- UnknownModel        NOT_FOUND            a request for another model than the served one
|  |- DuplicateRequest    ALREADY_EXISTS       a request id that is in use
|  |- RoleMissing         PERMISSION_DENIED    something that needs another role
|  |- NoTokenizer         FAILED_PRECONDITION  text, where the checkpoint came without a tokenizer
|  `- DeadlinePassed      DEADLINE_EXCEEDED    an answer for which nobody waits any more
`- Draining               UNAVAILABLE          a server on its way down
"""

from ...core.errors import RequestError, TkError


class NotBuilt(RequestError):
    """A field or a call that this version knows and cannot carry out."""

    grpc_status = "UNIMPLEMENTED"


class UnknownModel(RequestError):
    """A request for another model than the served one."""

    grpc_status = "NOT_FOUND"


class DuplicateRequest(RequestError):
    """A request id that another live request of the caller has."""

    grpc_status = "ALREADY_EXISTS"


class RoleMissing(RequestError):
    """Something that needs a role which the caller has not."""

    grpc_status = "PERMISSION_DENIED"


class NoTokenizer(RequestError):
    """Text, where the checkpoint came without a tokenizer."""

    grpc_status = "FAILED_PRECONDITION"


class DeadlinePassed(RequestError):
    """A request whose caller no longer waits for the answer."""

    grpc_status = "DEADLINE_EXCEEDED"


class Draining(TkError):
    """A server on its way down, that finishes what it has and takes nothing new.

    Attributes:
        retry_after: seconds after which another server behind the same name may answer.
    """

    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
