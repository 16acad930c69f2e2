"""Requests that a page of another site makes a browser send: they are refused, so that visiting a page costs nothing.

Such a page reaches a server in two ways. It asks the server under its own name, then the browser adds where the page is
from. Or its own name leads to this machine all at once (DNS rebinding): then the browser takes the server for a part of
the page's site, and only the name in the header Host shows that it is not.
"""

import re
from collections.abc import Sequence
from typing import Final

from ..options import ServerOptions, is_loopback
from .messages import HttpRequest
from .problems import HttpProblem

_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
_PORT: Final = re.compile(r":\d*$")


class OriginRules:
    """The names under which a server may be asked, and the sites whose pages may ask.

    Args:
        names: the names, in small letters; none = every name.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = tuple(names)

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
        origins = [value for name, value in request.headers if name == "origin"]
        if any(origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()) for origin in origins):
            raise HttpProblem(
                f"The page at {origins[0][:100]!r} is of another site, and browsers may ask from this server's own "
                f"page only, which they know as {host[:100]!r}. Ask from a program of yours instead.",
                403,
            )


def rules_of(options: ServerOptions) -> OriginRules:
    """Returns the rules of a server. With tokens, or for other machines, it may be asked by any name."""
    if options.tokens is not None or not is_loopback(options.host):
        return OriginRules()
    bound = f"[{options.host}]" if ":" in options.host else options.host
    return OriginRules(tuple(dict.fromkeys((*_LOOPBACK_NAMES, bound.lower()))))
