"""`tk token`: makes a token for a caller of `tk serve --tokens`."""

import os
import secrets
from pathlib import Path

import click

from .common import PATH


@click.command(epilog="Example: tk token alice --role generate --tokens callers")
@click.argument("principal")
@click.option(
    "--role", "roles", type=click.Choice(["generate", "admin"]), multiple=True, help="A role; default: generate."
)
@click.option(
    "--weight",
    metavar="WEIGHT",
    type=click.FloatRange(0.01, 100),
    default=1.0,
    show_default=True,
    help="Share beside others.",
)
@click.option(
    "--adapter",
    "adapters",
    metavar="NAME",
    multiple=True,
    help="Adapter that PRINCIPAL may use; repeat it for more. Default: all that the server has loaded.",
)
@click.option("--tokens", "path", metavar="FILE", type=PATH, required=True, help="File to which a line is added.")
def token(principal: str, roles: tuple[str, ...], weight: float, adapters: tuple[str, ...], path: Path) -> None:
    """Make a token for PRINCIPAL, add its hash to the file of tokens, and print the token.

    The token is printed once and stored nowhere: the file has only its SHA-256. A running server reads the changed file
    within a second. To withdraw a token, delete its line.
    """
    from ..core.errors import ConfigError
    from ..infer.serve.access.tokens import PRINCIPAL, Caller, line_of, parse_tokens, read_text, token_digest

    if not PRINCIPAL.fullmatch(principal):
        raise ConfigError(
            f"{principal!r} cannot be the name of a caller: it has 1 to 64 letters of ASCII, digits, dots, - and _, "
            "as in team-a."
        )
    text = read_text(path) if path.exists() else ""
    made = secrets.token_urlsafe(32)
    allowed = frozenset(adapters) or None
    line = line_of(token_digest(made), Caller(principal, frozenset(roles or ("generate",)), weight, allowed))
    separator = "" if text.endswith("\n") or not text else "\n"
    if parse_tokens(line, path)[token_digest(made)].adapters != allowed:
        raise ConfigError("--adapter has a name with a comma, a space or #, which the file of tokens cannot hold.")
    parse_tokens(text + separator + line, path)  # before it is written: a wrong name would make the file useless
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(separator + line)
    except OSError as error:
        raise ConfigError(
            f"Cannot write {path}: {error.strerror}. Name a file in a folder that exists and that you may write."
        ) from error
    click.echo(made)
