"""The sites whose pages may make a browser send a request, and the headers that browsers want for it (CORS).

Requests that a page of another site makes a browser send are refused, so that visiting a page costs nothing. Such a
page reaches a server in two ways. It asks the server under its own name, then the browser adds where the page is from.
Or its own name leads to this machine all at once (DNS rebinding): then the browser takes the server for a part of the
page's site, and only the name in the header Host shows that it is not.
"""

import re
from typing import Final, Self

from ..options import ServerOptions, is_loopback
from .framing import HttpRequest
from .problems import Headers, HttpProblem

_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
_PORT: Final = re.compile(r":\d*$")
# What pages of allowed sites may send and read; browsers ask before they send it.
_ALLOWED: Final = (
    ("access-control-allow-methods", "GET, POST"),
    ("access-control-allow-headers", "authorization, content-type, x-request-id, x-request-timeout"),
    ("access-control-max-age", "600"),
)
_EXPOSED: Final = ("access-control-expose-headers", "retry-after, x-request-id")


class Origins:
    """The sites whose pages may ask a server: its own, and those that its operator names.

    Args:
        names: the names under which the server may be asked, in small letters; none = every name.
        others: the sites of others, as browsers write them: https://chat.example, without a slash at the end.
    """

    def __init__(self, names: tuple[str, ...] = (), others: tuple[str, ...] = ()) -> None:
        self._names, self._others = names, frozenset(map(str.lower, others))

    @classmethod
    def of(cls, options: ServerOptions) -> Self:
        """Returns those of a server. With tokens, or for other machines, it may be asked by any name."""
        if options.tokens is not None or not is_loopback(options.host):
            return cls((), options.cors_origins)
        bound = f"[{options.host}]" if ":" in options.host else options.host
        return cls(tuple(dict.fromkeys((*_LOOPBACK_NAMES, bound.lower()))), options.cors_origins)

    def check(self, request: HttpRequest) -> None:
        """Checks where a request comes from.

        Raises:
            HttpProblem: a page of another site sent it (403), or it has a name that is not the server's (421).
        """
        host = request.header("host")
        if self._names and _PORT.sub("", host).lower() not in self._names:
            raise HttpProblem(
                f"The header Host is {host[:100]!r}; this server has no tokens, so it is asked as "
                f"{' or '.join(self._names)} only. Use one of these names, or start it with --tokens.",
                421,
            )
        if request.header("sec-fetch-site") in ("same-origin", "none"):  # a page cannot set this header
            return
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        for origin in (value for name, value in request.headers if name == "origin"):
            if origin.lower() not in own and origin.lower() not in self._others:
                raise HttpProblem(
                    f"The page at {origin[:100]!r} is of another site, and browsers may ask from this server's own "
                    f"page only, which they know as {host[:100]!r}. Ask from a program of yours instead, or start the "
                    "server with --cors-origin for that site.",
                    403,
                )

    def headers(self, request: HttpRequest) -> Headers:
        """Returns the headers of every answer to a request: those that let an allowed site's page read it."""
        if not self._others:
            return ()
        origin = request.header("origin")
        is_allowed = origin.lower() in self._others
        allowed = (("access-control-allow-origin", origin), _EXPOSED) if is_allowed else ()
        return (*allowed, *(_ALLOWED if is_allowed and self.is_question(request) else ()), ("vary", "origin"))

    def is_question(self, request: HttpRequest) -> bool:
        """Returns whether a browser asks if an allowed site's page may send a request; it has no token yet."""
        is_asked = request.method == "OPTIONS" and request.header("access-control-request-method") != ""
        return is_asked and request.header("origin").lower() in self._others
