"""The way of a request to its handler: where it comes from, caller, role, method and type of body.

Requests that a page of another site makes a browser send are refused, so that visiting a page costs nothing. Such a
page reaches a server in two ways. It asks the server under its own name, then the browser adds where the page is from.
Or its own name leads to this machine all at once (DNS rebinding): then the browser takes the server for a part of the
page's site, and only the name in the header Host shows that it is not.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ....core.errors import TkError
from ..access.tokens import GENERATE
from ..call.call import Frontend, ServerCall
from ..options import ServerOptions, is_loopback
from .connection import HttpConnection
from .framing import HttpRequest
from .json_body import JSON
from .problems import HttpProblem

UNKNOWN: Final = "(unknown)"  # the path of a call without a route, in the log
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"))
_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
_PORT: Final = re.compile(r":\d*$")
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
        names: the names under which it may be asked; none = every name.
    """

    def __init__(self, routes: Mapping[str, HttpRoute], frontend: Frontend, names: Sequence[str] = ()) -> None:
        self._routes, self._frontend, self._names = dict(routes), frontend, names

    async def __call__(self, request: HttpRequest, reply: HttpConnection) -> None:
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
        check_origin(request, self._names)
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


def check_origin(request: HttpRequest, names: Sequence[str]) -> None:
    """Checks where a request comes from.

    Args:
        request: what a browser may have sent, with its headers.
        names: those under which the server may be asked, in small letters; none = every name.

    Raises:
        HttpProblem: a page of another site sent it (403), or it has a name that is not the server's (421).
    """
    host = request.header("host")
    if names and _PORT.sub("", host).lower() not in names:
        raise HttpProblem(
            f"The header Host is {host[:100]!r}; this server has no tokens, so it is asked as "
            f"{' or '.join(names)} only. Use one of these names, or start it with --tokens.",
            421,
        )
    if request.header("sec-fetch-site") in ("same-origin", "none"):  # a page cannot set this header
        return
    origins = [value for name, value in request.headers if name == "origin"]
    if any(origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()) for origin in origins):
        raise HttpProblem(
            f"The page at {origins[0][:100]!r} is of another site, and browsers may ask from this server's own "
            f"page only, which they know as {host[:100]!r}. Ask from a program of yours instead.",
            403,
        )


def names_of(options: ServerOptions) -> Sequence[str]:
    """Returns the names for `check_origin`. With tokens, or for other machines, a server may be asked by any name."""
    if options.tokens is not None or not is_loopback(options.host):
        return ()
    bound = f"[{options.host}]" if ":" in options.host else options.host
    return tuple(dict.fromkeys((*_LOOPBACK_NAMES, bound.lower())))
