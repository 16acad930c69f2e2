"""The way of a request to its handler: where it comes from, caller, role, method and type of body."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ....core.errors import TkError
from ..access.tokens import GENERATE
from ..call.call import Frontend, ServerCall
from .connection import HttpConnection
from .framing import HttpRequest
from .json_body import JSON
from .origins import Origins
from .problems import HttpProblem

UNKNOWN: Final = "(unknown)"  # the path of a call without a route, in the log
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"))
_LOG: Final = logging.getLogger(__name__)


Handler = Callable[[HttpRequest, ServerCall, HttpConnection], Awaitable[None]]


@dataclass(frozen=True)
class HttpRoute:
    """A path.

    Attributes:
        handler: answers its requests.
        method: the only method that it takes; with GET, HEAD, whose replies have no body.
        role: the role that callers need; None = everyone may ask, without a token too.
    """

    handler: Handler
    method: str = "GET"
    role: str | None = GENERATE


class HttpRouter:
    """Answers requests by their routes; whatever goes wrong becomes an answer too.

    Args:
        routes: the routes by path; but for "/" itself, one that ends with "/" has all paths below it.
        frontend: identifies the callers, and has the log.
        origins: the sites whose pages may ask it.
    """

    def __init__(self, routes: Mapping[str, HttpRoute], frontend: Frontend, origins: Origins) -> None:
        self._routes, self._frontend, self._origins = dict(routes), frontend, origins

    async def __call__(self, request: HttpRequest, reply: HttpConnection) -> None:
        reply.own_headers = self._origins.headers(request)
        if self._origins.is_question(request):
            await reply.whole(200, "text/plain", b"")
            return
        name = self._name_of(request.path)
        method = f"{request.method if request.method in _METHODS else 'OTHER'} {name or UNKNOWN}"
        try:
            with self._frontend.log.call(method, request.client, request.id) as record:
                call = ServerCall(self._frontend, record, request.headers)
                handler = self._admitted(request, self._routes.get(name), call)
                await handler(request, call, reply)
        except (ConnectionError, TimeoutError):  # of the connection: no one reads an answer
            raise
        except Exception as error:
            if not isinstance(error, TkError):
                _LOG.exception("a request failed by a fault of the server")
            await reply.problem(error)

    def _admitted(self, request: HttpRequest, route: HttpRoute | None, call: ServerCall) -> Handler:
        """Returns the handler of a request, which may have it."""
        self._origins.check(request)
        if route is None or route.role is not None:
            call.identify()
        if route is None:
            raise HttpProblem(f"There is nothing at {request.path[:200]}.", 404)
        if route.role is not None:
            call.caller.require(route.role)
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        if request.method not in methods:
            raise HttpProblem(f"{request.path} takes {route.method} only.", 405, [("allow", ", ".join(methods))])
        if any(name == "content-encoding" and value.lower() != "identity" for name, value in request.headers):
            raise HttpProblem("The body must have no content-encoding.", 415)
        # Pages of other sites can make a browser send any type but this one.
        if route.method == "POST" and request.header("content-type").partition(";")[0].strip().lower() != JSON:
            raise HttpProblem(f"The content-type must be {JSON}.", 415)
        return route.handler

    def _name_of(self, path: str) -> str:
        """Returns the name of a path's route; "" if there is none."""
        if path in self._routes:
            return path
        folders = (name for name in self._routes if name != "/" and name.endswith("/") and path.startswith(name))
        return next(folders, "")
