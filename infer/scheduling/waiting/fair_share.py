"""Fair shares of the engine between principals, in virtual time: a principal's served tokens divided by its weight.

The principal with the lowest virtual time is served next. One that comes back from idleness starts at the system's
virtual time or at its own, if that is later: idleness earns no credit, and debts are not forgotten. The system's time
is at least the lowest of the busy principals (the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024, section 4), and it grows by every served token divided by the weights of the busy ones (as
in weighted fair queueing, Demers et al., 1989), so that newcomers without end do not starve a principal either.
"""

from dataclasses import dataclass

from .lazy_heap import LazyHeap


@dataclass(slots=True)
class _Account:
    time: float = 0.0
    weight: float = 1.0
    num_live: int = 0


class FairShare:
    """The virtual times of the principals with live sequences, and of idle ones that are still in debt."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._busy: LazyHeap[str] = LazyHeap()  # a key may be before the account's time, never after it
        self._idle: LazyHeap[str] = LazyHeap()
        self._time = 0.0
        self._weight = 0.0  # of the busy ones together

    def enter(self, principal: str, weight: float) -> None:
        """Records that a sequence of the principal is live."""
        account = self._accounts.setdefault(principal, _Account())
        if not account.num_live:
            self._follow_busy()
            account.time, account.weight = max(account.time, self._time), weight
            self._idle.discard(principal)
            self._busy.push(principal, account.time)
            self._weight += weight
        account.num_live += 1

    def leave(self, principal: str) -> None:
        """Records that a sequence of the principal is not live any more."""
        account = self._accounts[principal]
        account.num_live -= 1
        if account.num_live:
            return
        self._busy.discard(principal)
        self._idle.push(principal, account.time)
        self._weight -= account.weight
        while (first := self._idle.first()) is not None and (not self._busy or self._idle.key(first) <= self._time):
            self._time = self._time if self._busy else max(self._time, self._idle.key(first))
            self._idle.discard(first)
            del self._accounts[first]
        if not self._busy:
            self._weight = 0.0

    def charge(self, principal: str, weight: float, num_tokens: int) -> None:
        """Adds served tokens to a principal with live sequences."""
        self._accounts[principal].time += num_tokens / weight
        self._time += num_tokens / self._weight

    @property
    def num_busy(self) -> int:
        """The number of principals with live sequences."""
        return len(self._busy)

    def part(self, principal: str, weight: float) -> float:
        """Returns the part of the engine that is a principal's: its weight among those of the busy ones and its own."""
        account = self._accounts.get(principal)
        is_busy = account is not None and account.num_live > 0
        return weight / (self._weight if is_busy else self._weight + weight)

    def time(self, principal: str) -> float:
        """Returns the virtual time of a principal with live sequences, in tokens per unit of weight."""
        return self._accounts[principal].time

    def num_live_of(self, principal: str) -> int:
        """Returns the number of live sequences of a principal."""
        account = self._accounts.get(principal)
        return 0 if account is None else account.num_live

    def num_live(self) -> dict[str, int]:
        """Returns the number of live sequences of every principal that has some."""
        return {name: account.num_live for name, account in self._accounts.items() if account.num_live}

    def _follow_busy(self) -> None:
        """Moves the system's time to the lowest time of the busy principals, if that is later."""
        while (principal := self._busy.first()) is not None:
            time = self._accounts[principal].time
            if self._busy.key(principal) == time:
                self._time = max(self._time, time)
                return
            self._busy.push(principal, time)
