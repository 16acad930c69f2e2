"""The servers that rows of the table need, each on a free port of this machine while the command runs."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final

import grpc

from tk.infer.serve.access.tls import Certificates
from tk.tests.infer.serve import fake_engine
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread

_PEM: Final = Path(fake_engine.__file__).with_name("certificates")
CA: Final = _PEM / "ca.pem"
OTHER_CA: Final = _PEM / "other-ca.pem"
TOKENS: Final = "callers.txt"  # in the world


def _options(kind: str) -> dict[str, Any]:
    """Returns the options of a server of tk."""
    certificates = Certificates(_PEM / "server.pem", _PEM / "server.key", CA if kind == "certificates" else None)
    return {"plain": {}, "tokens": {"tokens": Path(TOKENS)}}.get(kind, {"certificates": certificates})


@contextmanager
def serving(kind: str) -> Iterator[str]:
    """Yields the address of a server.

    Args:
        kind: "plain"; "tls"; "certificates" (TLS, and clients need some); "tokens"; "old" (gRPC without any call of
            ours); "http" (no gRPC); "taken" (something that listens).
    """
    if kind == "taken":
        with socket.create_server(("127.0.0.1", 0)) as taken:
            yield f"127.0.0.1:{taken.getsockname()[1]}"
    elif kind == "http":
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
            Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
            yield f"127.0.0.1:{web.server_port}"
            web.shutdown()
    elif kind == "old":
        old = grpc.server(ThreadPoolExecutor(1))
        port = old.add_insecure_port("127.0.0.1:0")
        old.start()
        yield f"127.0.0.1:{port}"
        old.stop(0).wait()
    else:
        with closing(FakeEngine()) as engine, closing(ServerThread(engine, **_options(kind))) as server:
            yield server.target
