"""Why a server was not reached, and what to do: gRPC's texts for it in the words of a user."""

import re
from typing import Final

# Parts of gRPC's texts, and what they mean. The first that is found is used.
_CAUSES: Final = (
    (
        ("WRONG_VERSION_NUMBER", "wrong version number"),
        "the server's port is not encrypted, and this client asked for TLS. Leave out --tls, --tls-ca and --tls-cert "
        "(in Python: Credentials), or start the server with --tls-cert and --tls-key.",
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed"),
        "the server's certificate is not of an authority that this client knows. Pass the authority's PEM file with "
        "--tls-ca (in Python: Credentials(ca=...)).",
    ),
    (
        ("Hostname Verification Check failed", "is not valid for"),
        "the server's certificate is for another name than this one. Call the server by a name that its certificate "
        "has.",
    ),
    (
        ("HTTP/2", "http1", "HTTP/1"),
        "a server answers there, but not in gRPC: this may be its port of HTTP. Name its port of gRPC, which "
        "`tk serve` prints as `ready HOST:PORT`.",
    ),
    (
        ("Connection refused",),
        "no server listens there. Start one (tk serve), wait for its line `ready HOST:PORT`, or correct host and port.",
    ),
    (
        ("Socket closed", "Connection reset", "end of file", "GOAWAY"),
        "the server ended the connection at once. If it is encrypted, pass --tls, or --tls-ca with the PEM file of its "
        "authority, and --tls-cert with --tls-key if it asks for a client's certificate (in Python: Credentials).",
    ),
    (
        ("Domain name not found", "DNS resolution", "errors resolving", "lookup", "Name or service not known"),
        "no machine has that name. Write the address as HOST:PORT.",
    ),
    (
        ("Timeout", "timed out", "No route", "unreachable", "Deadline"),
        "no answer came from there. Check that this machine reaches that host, and that no firewall is between.",
    ),
)
_CONNECTING: Final = re.compile(r"failed to connect to all addresses|errors resolving|Socket closed|DNS resolution")


def explained(details: str) -> str:
    """Returns gRPC's text for a server that was not reached, as a cause with what to do; any other text as it is."""
    if not _CONNECTING.search(details):
        return details
    for parts, cause in _CAUSES:
        if any(part in details for part in parts):
            return cause
    return details


def advice_for(status: str) -> str:
    """Returns what to do about a status that the server's own words leave open, with a space before it; else ""."""
    if status == "UNIMPLEMENTED":
        return (
            " The server does not have this call: it is of another version than this client, has it on another port "
            "(--admin-port), or is no `tk serve`. Compare `tk --version` on both machines."
        )
    if status == "UNAUTHENTICATED":
        return " `tk token` makes one, and the commands of tk read it from the environment variable TK_TOKEN."
    if status == "PERMISSION_DENIED":
        return " The owner of the server's file of tokens can make one that may (tk token, --role or --adapter)."
    return ""
