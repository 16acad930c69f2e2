"""The routes of the page's files. They hold nothing of the model, so they are sent without a token."""

from pathlib import Path
from typing import Final

from ...call.call import ServerCall
from ...http.connection import HttpConnection
from ...http.framing import HttpRequest
from ...http.problems import Headers
from ...http.router import HttpRoute

FILES: Final = (
    ("/", "index.html", "text/html; charset=utf-8"),
    ("/page.css", "page.css", "text/css; charset=utf-8"),
    ("/page.js", "page.js", "text/javascript; charset=utf-8"),
    ("/server.js", "server.js", "text/javascript; charset=utf-8"),
    ("/icon.svg", "icon.svg", "image/svg+xml"),
)
# Only this server's own files, and no text that becomes markup or a script: browsers refuse both, whatever we overlook.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final[Headers] = (
    ("content-security-policy", POLICY),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)


def page_routes() -> dict[str, HttpRoute]:
    """Returns the routes of the page by their paths; the files are read once, here."""
    return {path: _route(Path(__file__).with_name(name).read_bytes(), media_type) for path, name, media_type in FILES}


def _route(content: bytes, media_type: str) -> HttpRoute:
    async def send(request: HttpRequest, call: ServerCall, reply: HttpConnection) -> None:
        await reply.whole(200, media_type, content, HEADERS)

    return HttpRoute(send, role=None)
