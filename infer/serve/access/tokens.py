"""The file of tokens of a server: one line per token, with its principal, roles, SHA-256 and weight (1 if left out).

The file holds no token, so reading it gives no access.

    # principal  roles           sha256 of the token                   weight
    search       generate        9f86d081884c7d659a2feaa0c55ad015...   4
    ops          generate,admin  60303ae22b998861bce3b28f33eec1be...
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....core.errors import ConfigError
from ..errors import RoleMissing

GENERATE: Final = "generate"
ADMIN: Final = "admin"
ROLES: Final = frozenset((GENERATE, ADMIN))
PRINCIPAL: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Caller:
    """A caller that the server knows.

    Attributes:
        principal: the caller's name; "" on a server without tokens.
        roles: the roles that it has, a part of ROLES.
        weight: its share of the engine's tokens beside those of others, while their requests wait.
    """

    principal: str = ""
    roles: frozenset[str] = ROLES
    weight: float = 1.0

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
    return f"{caller.principal} {','.join(sorted(caller.roles))} {digest}{weight}\n"


def read_text(path: Path) -> str:
    """Returns the content of a file of tokens; raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
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
    """Parses the words of a line: principal, roles, digest, weight."""
    if len(words) not in (3, 4):
        raise ConfigError(f"{where}: it has {len(words)} words; write PRINCIPAL ROLES SHA256 [WEIGHT].")
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
    return digest, Caller(principal, roles, weight)
