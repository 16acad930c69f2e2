"""The grammars that are kept for later requests: a bounded number, of which no principal's requests take another's."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from .grammar import Grammar

NUM_KEPT: Final = 32  # a simple grammar has some hundred KiB, and one with as many states as it may have 25 MiB


class KeptGrammars:
    """The grammars of principals, who share none: the time to build one would show which ones others use.

    Above the bound, the principal with the most grammars loses the one that it has not used for longest. All methods
    may be called from any thread.

    Args:
        most: the number of grammars of all principals.
    """

    def __init__(self, most: int = NUM_KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()  # guards all below
        self._of: dict[str, OrderedDict[Hashable, Grammar]] = {}  # by principal; each has at least one

    def find(self, principal: str, name: Hashable) -> Grammar | None:
        """Returns a principal's grammar, unless it is worn."""
        with self._lock:
            own = self._of.get(principal, OrderedDict())
            if name not in own or own[name].is_worn:
                return None
            own.move_to_end(name)
            return own[name]

    def add(self, principal: str, name: Hashable, grammar: Grammar) -> None:
        """Keeps a grammar, and lets go of worn ones and of those above the bound."""
        with self._lock:
            self._of.setdefault(principal, OrderedDict())[name] = grammar
            self._of[principal].move_to_end(name)
            for owner, kept in list(self._of.items()):
                for each in [each for each in kept if kept[each].is_worn]:
                    self._drop(owner, each)
            while sum(map(len, self._of.values())) > self._most:
                fullest = max(self._of, key=lambda owner: (len(self._of[owner]), owner == principal))
                self._drop(fullest, next(iter(self._of[fullest])))

    def _drop(self, principal: str, name: Hashable) -> None:
        del self._of[principal][name]
        if not self._of[principal]:
            del self._of[principal]
