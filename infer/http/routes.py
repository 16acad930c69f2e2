"""The paths of the HTTP port, and the way of a request to its handler: caller, role, method and type of body."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ...core.errors import TkError
from ..server.access.callers import Callers
from ..server.access.tokens import GENERATE, Caller
from ..server.errors import UnknownModel
from ..server.lifecycle.lifecycle import ServerState
from .asked import read_chat, read_completion
from .choices import ChatDialect, TextDialect
from .completions import Completions
from .served import ServedModel
from .transport.messages import JSON, HttpRequest, Reply, dumped, event_of, send_json
from .transport.problems import HttpProblem, body_of, headers_of, status_of

Handler = Callable[[HttpRequest, Caller, Reply], Awaitable[None]]
_MODELS: Final = "/v1/models/"  # followed by the name of one
_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpRoute:
    """A path.

    Attributes:
        handler: answers its requests.
        method: the only method that it takes.
        role: the role that callers need; None = everyone may ask, without a token too.
    """

    handler: Handler
    method: str = "GET"
    role: str | None = GENERATE


def routes_of(model: ServedModel) -> dict[str, HttpRoute]:
    """Returns the routes of a model by their paths."""

    async def health(request: HttpRequest, caller: Caller, reply: Reply) -> None:
        state = model.state
        await send_json(reply, {"status": state.value}, 200 if state is ServerState.SERVING else 503)

    async def models(request: HttpRequest, caller: Caller, reply: Reply) -> None:
        await send_json(reply, {"object": "list", "data": [_described(model)]})

    async def one_model(request: HttpRequest, caller: Caller, reply: Reply) -> None:
        if request.path != f"/v1/models/{model.info.name}":
            raise UnknownModel(f"The model {request.path[len(_MODELS) :][:200]!r} is not served here.")
        await send_json(reply, _described(model))

    return {
        "/health": HttpRoute(health, role=None),
        "/v1/models": HttpRoute(models),
        _MODELS: HttpRoute(one_model),
        "/v1/completions": HttpRoute(Completions(model, read_completion, TextDialect()), "POST"),
        "/v1/chat/completions": HttpRoute(Completions(model, read_chat, ChatDialect()), "POST"),
    }


class HttpRouter:
    """Answers requests by their routes; whatever goes wrong becomes an answer too."""

    def __init__(self, routes: Mapping[str, HttpRoute], callers: Callers) -> None:
        self._routes, self._callers = dict(routes), callers

    async def __call__(self, request: HttpRequest, reply: Reply) -> None:
        try:
            await self._answer(request, reply)
        except (ConnectionError, TimeoutError):  # of the connection: no one reads an answer
            raise
        except Exception as error:
            if not isinstance(error, TkError):
                _LOG.exception("a request failed by a fault of the server")
            await _send_problem(error, reply)

    async def _answer(self, request: HttpRequest, reply: Reply) -> None:
        path = request.path
        route = self._routes.get(_MODELS if path.startswith(_MODELS) else path)
        caller = Caller()
        if route is None or route.role is not None:
            caller = self._callers.identify(request.headers)
        if route is None:
            raise HttpProblem(f"There is nothing at {request.path[:200]}.", 404)
        if route.role is not None:
            caller.require(route.role)
        if request.method != route.method:
            raise HttpProblem(f"{request.path} takes {route.method} only.", 405, [("allow", route.method)])
        # Pages of other sites can make a browser send any type but this one.
        if route.method == "POST" and request.header("content-type").partition(";")[0].strip().lower() != JSON:
            raise HttpProblem(f"The content-type must be {JSON}.", 415)
        await route.handler(request, caller, reply)


async def _send_problem(error: Exception, reply: Reply) -> None:
    if not reply.has_begun:
        await reply.whole(status_of(error), JSON, dumped(body_of(error)), headers_of(error))
        return
    await reply.send(event_of(body_of(error)))  # the only replies in parts are streams of events
    await reply.end()


def _described(model: ServedModel) -> dict[str, object]:
    info = model.info
    return {
        "id": info.name,
        "object": "model",
        "created": 0,
        "owned_by": "tk",
        "max_model_len": info.max_model_len,
        "step": info.step,
        "manifest_sha256": info.manifest_sha256,
    }
