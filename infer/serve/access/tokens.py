"""The callers of a server, and its file of tokens: a line each with principal, roles, SHA-256, weight and adapters.

The file holds no token, so reading it gives no access. A weight that is left out is 1, and adapters that are
left out are all.

    # principal  roles           sha256 of the token                   weight  adapters
    search       generate        9f86d081884c7d659a2feaa0c55ad015...   4       adapters=sql,legal
    ops          generate,admin  60303ae22b998861bce3b28f33eec1be...
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ....core.errors import ConfigError
from ....core.given_files import read_given_text
from ..errors import RoleMissing, Unauthenticated

GENERATE: Final = "generate"
ADMIN: Final = "admin"
ROLES: Final = frozenset((GENERATE, ADMIN))
PRINCIPAL: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ADAPTERS: Final = "adapters="


@dataclass(frozen=True)
class Caller:
    """A caller that the server knows.

    Attributes:
        principal: the caller's name; "" on a server without tokens.
        roles: the roles that it has, a part of ROLES.
        weight: its share of the engine's tokens beside those of others, while their requests wait.
        adapters: the names of the adapters that it may use; None = all.
    """

    principal: str = ""
    roles: frozenset[str] = ROLES
    weight: float = 1.0
    adapters: frozenset[str] | None = None

    def may_use(self, adapter: str) -> bool:
        """Returns whether the caller may use an adapter; the base alone, "", may be used by all."""
        return not adapter or self.adapters is None or adapter in self.adapters

    def require(self, role: str) -> None:
        """Raises RoleMissing if the caller lacks a role."""
        if role not in self.roles:
            raise RoleMissing(f"This call needs the role {role}, which the token of {self.principal!r} does not have.")


def token_digest(token: str) -> str:
    """Returns the SHA-256 of a token, 64 hexadecimal digits, as the file of tokens has it."""
    return hashlib.sha256(token.encode()).hexdigest()


def line_of(digest: str, caller: Caller) -> str:
    """Returns the line of a token, with its newline."""
    weight = "" if caller.weight == 1 else f" {caller.weight:g}"
    adapters = "" if caller.adapters is None else f" {_ADAPTERS}{','.join(sorted(caller.adapters))}"
    return f"{caller.principal} {','.join(sorted(caller.roles))} {digest}{weight}{adapters}\n"


def read_text(path: Path) -> str:
    """Returns the content of a file of tokens; raises ConfigError if it cannot be read."""
    try:
        return read_given_text(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"Cannot read the tokens in {path}: the file does not exist. `tk token NAME --tokens {path}` makes it."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the tokens in {path}: {error}.") from error


def parse_tokens(text: str, path: Path) -> dict[str, Caller]:
    """Returns the callers of a file of tokens by the digests of their tokens.

    Raises:
        ConfigError: the file has no token, or a line is wrong.
    """
    callers: dict[str, Caller] = {}
    weights: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        digest, caller = _caller_of(words, f"{path}, line {number}")
        if digest in callers:
            raise ConfigError(f"{path}, line {number}: an earlier line has the same token; give each its own.")
        if weights.setdefault(caller.principal, caller.weight) != caller.weight:
            raise ConfigError(f"{path}, line {number}: {caller.principal!r} has another weight in an earlier line.")
        callers[digest] = caller
    if not callers:
        raise ConfigError(f"{path} lists no token, so no caller could use the server; add one with `tk token`.")
    return callers


def _caller_of(words: list[str], where: str) -> tuple[str, Caller]:
    """Parses the words of a line: principal, roles, digest, weight, adapters."""
    adapters = None
    if len(words) in (4, 5) and words[-1].startswith(_ADAPTERS):
        *words, last = words
        adapters = frozenset(filter(None, last.removeprefix(_ADAPTERS).split(",")))
    if len(words) not in (3, 4):
        raise ConfigError(
            f"{where}: it has {len(words)} words; write PRINCIPAL ROLES SHA256 [WEIGHT] [adapters=NAME,...]."
        )
    principal, roles, digest = words[0], frozenset(words[1].split(",")), words[2].lower()
    if not PRINCIPAL.fullmatch(principal):
        raise ConfigError(f"{where}: principal {principal!r}; use 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    if not roles <= ROLES:
        raise ConfigError(f"{where}: roles {words[1]!r}; write generate, admin or generate,admin.")
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: the third word must be the SHA-256 of the token, 64 hexadecimal digits.")
    try:
        weight = float(words[3]) if len(words) == 4 else 1.0
    except ValueError:
        weight = 0.0
    if not 0.01 <= weight <= 100:
        raise ConfigError(f"{where}: weight {words[3]!r}; it must be 0.01 to 100.")
    return digest, Caller(principal, roles, weight, adapters)


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
