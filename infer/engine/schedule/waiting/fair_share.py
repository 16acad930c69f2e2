"""Fair shares of the engine between principals, in virtual time: a principal's served tokens divided by its weight.

The principal with the lowest virtual time is served next (the virtual token counter of Sheng et al., "Fairness in
Serving Large Language Models", OSDI 2024, section 4). One that comes back from idleness starts at the system's virtual
time or at its own, if that is later: idleness earns no credit, and a debt is not forgotten. The system's time grows by
every served token divided by the weights of the busy principals (as in weighted fair queueing, Demers et al., 1989), so
that newcomers without end do not starve a principal either.

What a principal has beyond the system's time it owes to those below it alone. One that has all it asks
for, or leaves, is owed nothing any more. So the system's time is at least the mean of the busy principals' times, by
weight: one that takes what others leave does not pay for it later.
"""

from dataclasses import dataclass

from .lazy_heap import LazyHeap


@dataclass(slots=True)
class _Account:
    time: float = 0.0
    weight: float = 1.0
    num_live: int = 0


class FairShare:
    """The virtual times of the principals with live samples, and of idle ones that are still in debt.

    Attributes:
        num_busy: the number of principals with live samples.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._idle: LazyHeap[str] = LazyHeap()
        self._time = 0.0
        self.num_busy = 0
        self._weight = 0.0  # of the busy ones together
        self._tokens = 0.0  # the sum of their times multiplied by their weights

    def enter(self, principal: str, weight: float) -> None:
        """Records that a sample of the principal is live; the newest one's weight holds."""
        account = self._accounts.setdefault(principal, _Account())
        if account.num_live:
            self._count(account, -1)
        else:
            self._idle.discard(principal)
            account.time = max(account.time, self._time)
        account.weight = weight
        account.num_live += 1
        self._count(account, 1)

    def leave(self, principal: str) -> None:
        """Records that a sample of the principal is not live any more."""
        account = self._accounts[principal]
        account.num_live -= 1
        if account.num_live:
            return
        self._count(account, -1)
        self._raise_time()
        self._idle.push(principal, account.time)
        while (first := self._idle.first()) is not None and (not self.num_busy or self._idle.key(first) <= self._time):
            self._time = max(self._time, self._idle.key(first))
            self._idle.discard(first)
            del self._accounts[first]

    def charge(self, principal: str, num_tokens: int) -> None:
        """Adds served tokens to a principal with live samples."""
        account = self._accounts[principal]
        account.time += num_tokens / account.weight
        self._tokens += num_tokens
        self._time += num_tokens / self._weight

    def settle(self, principal: str) -> None:
        """Records that a principal with live samples has all that it asks for: it is owed nothing."""
        account = self._accounts[principal]
        if account.time < self._time:
            self._tokens += (self._time - account.time) * account.weight
            account.time = self._time
            self._raise_time()

    def part(self, principal: str, weight: float) -> float:
        """Returns the part of the engine that is a principal's: its weight among those of the busy ones and its own."""
        account = self._accounts.get(principal)
        is_busy = account is not None and account.num_live > 0
        return weight / (self._weight if is_busy else self._weight + weight)

    def time(self, principal: str) -> float:
        """Returns the virtual time of a principal with live samples, in tokens per unit of weight."""
        return self._accounts[principal].time

    def is_in_debt(self, principal: str) -> bool:
        """Returns whether a principal with live samples has got more than its share."""
        return self._accounts[principal].time > self._time

    def num_live_of(self, principal: str) -> int:
        """Returns the number of live samples of a principal."""
        account = self._accounts.get(principal)
        return 0 if account is None else account.num_live

    def num_live(self) -> dict[str, int]:
        """Returns the number of live samples of every principal that has some."""
        return {name: account.num_live for name, account in self._accounts.items() if account.num_live}

    def _count(self, account: _Account, sign: int) -> None:
        """Counts a principal as busy, or as not busy any more."""
        self.num_busy += sign
        self._weight += sign * account.weight
        self._tokens += sign * account.time * account.weight
        if not self.num_busy:
            self._weight = self._tokens = 0.0  # and not what rounding left of them

    def _raise_time(self) -> None:
        """Moves the system's time to the mean of the busy principals' times, if that is later."""
        if self.num_busy:
            self._time = max(self._time, self._tokens / self._weight)
