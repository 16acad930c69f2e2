"""The options of commands that call a server: encryption and, from the environment, the token."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from .common import PathType

if TYPE_CHECKING:
    from ..infer.client.connection import Credentials

TOKEN_VARIABLE: Final = "TK_TOKEN"
_FILE: Final = PathType(exists=True, dir_okay=False, path_type=Path)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def connection_options(command: _Command) -> _Command:
    """Adds --tls, --tls-ca, --tls-cert and --tls-key to a command."""
    for add in reversed(
        (
            click.option("--tls", is_flag=True, help="Encrypt the connection to HOST:PORT."),
            click.option("--tls-ca", type=_FILE, help="PEM file of the authorities of the server's certificate."),
            click.option(
                "--tls-cert", metavar="FILE", type=_FILE, help="PEM file of this client's certificate; needs --tls-key."
            ),
            click.option("--tls-key", metavar="FILE", type=_FILE, help="PEM file of its private key."),
        )
    ):
        command = add(command)
    return command


def take_credentials(options: dict[str, Any]) -> "Callable[[], Credentials]":
    """Takes the connection's options out of a command's; returns the function that makes credentials of them.

    gRPC, which credentials import, is not needed by every run of a command.
    """
    tls, ca, cert, key = (options.pop(name) for name in ("tls", "tls_ca", "tls_cert", "tls_key"))

    def make() -> "Credentials":
        from ..infer.client.connection import Credentials

        return Credentials(token=os.environ.get(TOKEN_VARIABLE), tls=tls, ca=ca, cert=cert, key=key)

    return make
