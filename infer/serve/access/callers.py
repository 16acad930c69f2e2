"""The callers of a server, identified by the bearer tokens of their calls."""

import hashlib
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ....core.errors import ConfigError
from ..errors import Unauthenticated
from .tokens import Caller, parse_tokens, read_text, token_digest

METADATA_KEY: Final = "authorization"
# Seconds for which a file of tokens is not looked at again.
RELOAD_SECONDS: Final = 1.0
_SCHEME: Final = "bearer "
_LOG: Final = logging.getLogger(__name__)


class Callers:
    """The callers of a server without tokens: all are the same one, which has every role."""

    def identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Returns the caller of a call with these metadata (HTTP headers).

        Raises:
            Unauthenticated: the metadata have no token, or an unknown one.
        """
        return Caller()


class TokenCallers(Callers):
    """The callers that a file of tokens lists; a changed file takes effect within a second.

    Tokens are compared in constant time: the table's keys are hashes that a secret of this process enters, so the
    time of a look-up says nothing about other tokens.

    Args:
        path: the file of tokens.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = secrets.token_bytes(32)
        self._version = _version(path)
        self._callers = self._read()
        self._looked = time.monotonic()

    def identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        self._reload_if_changed()
        given = [value for name, value in metadata if name == METADATA_KEY]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].lower().startswith(_SCHEME):
            raise Unauthenticated('This server needs a token: send the metadata "authorization: Bearer TOKEN" once.')
        token = given[0][len(_SCHEME) :].strip()
        caller = self._callers.get(self._hidden(token_digest(token)))
        if caller is None:
            raise Unauthenticated("The token is unknown to this server, or no longer valid.")
        return caller

    def _reload_if_changed(self) -> None:
        """Reads a file again that has changed. One that cannot be read or is wrong changes nothing but the log."""
        if time.monotonic() - self._looked < RELOAD_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            version = _version(self._path)
            if version != self._version:
                self._callers, self._version = self._read(), version
                _LOG.info("read %d tokens from %s", len(self._callers), self._path)
        except ConfigError as error:
            _LOG.error("the tokens read before stay valid: %s", error)

    def _read(self) -> Mapping[bytes, Caller]:
        callers = {
            self._hidden(digest): caller for digest, caller in parse_tokens(read_text(self._path), self._path).items()
        }
        return MappingProxyType(callers)

    def _hidden(self, digest: str) -> bytes:
        return hashlib.blake2b(digest.encode(), key=self._key, digest_size=32).digest()


def _version(path: Path) -> tuple[int, int, int]:
    """Returns values of which one changes with the file."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"Cannot read the tokens in {path}: {error}.") from error
    return status.st_mtime_ns, status.st_size, status.st_ino
