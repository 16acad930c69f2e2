"""Errors that only a server raises; the engine's errors are in core/errors.py.

TkError
|- RequestError
|  |- NotBuilt            UNIMPLEMENTED        a field or call that this version knows and does not implement
|  |- UnknownModel        NOT_FOUND            a request for another model than the served one
|  |- DuplicateRequest    ALREADY_EXISTS       a request id that is in use
|  |- Unauthenticated     UNAUTHENTICATED      a call without a token, or with an unknown one
|  |- RoleMissing         PERMISSION_DENIED    a request that needs a role which the caller lacks
|  |- NoTokenizer         FAILED_PRECONDITION  text for a checkpoint without a tokenizer
|  |- NoChatTemplate      FAILED_PRECONDITION  a conversation for a checkpoint without a chat template
|  `- CannotReload        FAILED_PRECONDITION  weights that cannot replace the served ones
|- Loading                UNAVAILABLE          a request to a server that is not ready yet
`- Draining               UNAVAILABLE          a request to a server that shuts down
"""

from ...core.errors import RequestError, TkError


class NotBuilt(RequestError):
    """A field or a call that this version knows and does not implement."""

    grpc_status = "UNIMPLEMENTED"


class UnknownModel(RequestError):
    """A request for another model than the served one."""

    grpc_status = "NOT_FOUND"


class DuplicateRequest(RequestError):
    """A request id that another live request has."""

    grpc_status = "ALREADY_EXISTS"


class Unauthenticated(RequestError):
    """A call without a token, or with one that the server does not know."""

    grpc_status = "UNAUTHENTICATED"


class RoleMissing(RequestError):
    """A request that needs a role which the caller lacks."""

    grpc_status = "PERMISSION_DENIED"


class NoTokenizer(RequestError):
    """Text for a checkpoint without a tokenizer."""

    grpc_status = "FAILED_PRECONDITION"


class NoChatTemplate(RequestError):
    """A conversation for a checkpoint without a chat template."""

    grpc_status = "FAILED_PRECONDITION"


class Loading(TkError):
    """A request to a server that loads the model.

    Attributes:
        retry_after: the number of seconds after which it is worth another try.
    """

    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CannotReload(RequestError):
    """A checkpoint whose weights cannot replace the served ones."""

    grpc_status = "FAILED_PRECONDITION"


class Draining(TkError):
    """A request to a server that shuts down: it finishes its live requests and accepts no new ones.

    Attributes:
        retry_after: the number of seconds after which another server behind the same name may answer.
    """

    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
