"""Errors that only a server raises, and the text of an error for its caller; the engine's errors are in core/errors.py.

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

from typing import Final

from ...core.errors import RequestError, TkError

# The headers of gRPC carry the text three times (percent-encoded, and in the details); peers accept 8 KiB of headers.
MAX_MESSAGE_BYTES: Final = 1000


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


class CannotReload(RequestError):
    """A checkpoint whose weights cannot replace the served ones."""

    grpc_status = "FAILED_PRECONDITION"


class _NotNow(TkError):
    """A request to a server that takes none now.

    Attributes:
        retry_after: the number of seconds after which it is worth another try, there or behind the same name.
    """

    grpc_status = "UNAVAILABLE"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Loading(_NotNow):
    """A request to a server that loads the model."""


class Draining(_NotNow):
    """A request to a server that shuts down: it finishes its live requests and accepts no new ones."""


def text_for_client(error: Exception) -> str:
    """Returns the error's text for the client; an unforeseen one goes only to the log: it may be confidential."""
    text = str(error) if isinstance(error, TkError) else f"A fault of the server ({type(error).__name__}); see its log."
    raw = text.encode(errors="replace")
    return (
        raw.decode() if len(raw) <= MAX_MESSAGE_BYTES else raw[: MAX_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
    )
