"""Fair shares of the engine between principals, in virtual time: a principal's served tokens divided by its weight.

The principal with the lowest virtual time is served next. One that comes back from idleness starts at the lowest time
of the busy ones, so that idleness earns no credit and debts are not forgotten (the virtual token counter of Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024, section 4; start-time fair queueing of Goyal et al., 1996).
"""

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class _Account:
    time: float
    num_live: int = 0


class FairShare:
    """The virtual times of the principals with live sequences, and of others that are still in debt."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._heap: list[tuple[float, str]] = []  # one entry per account, with a time that is not after the account's
        self._floor = 0.0

    def enter(self, principal: str) -> None:
        """Records that a sequence of the principal is live."""
        account = self._accounts.get(principal)
        if account is None or not account.num_live:
            self._raise_floor()
            account = self._accounts.get(principal)
        if account is None:
            account = self._accounts[principal] = _Account(self._floor)
            heapq.heappush(self._heap, (account.time, principal))
        account.num_live += 1

    def leave(self, principal: str) -> None:
        """Records that a sequence of the principal is not live any more."""
        self._accounts[principal].num_live -= 1

    def charge(self, principal: str, weight: float, num_tokens: int) -> None:
        """Adds served tokens to a principal with live sequences."""
        self._accounts[principal].time += num_tokens / weight

    def time(self, principal: str) -> float:
        """Returns the virtual time of a principal with live sequences, in tokens per unit of weight."""
        return self._accounts[principal].time

    def num_live(self) -> dict[str, int]:
        """Returns the number of live sequences of every principal that has some."""
        return {name: account.num_live for name, account in self._accounts.items() if account.num_live}

    def _raise_floor(self) -> None:
        """Raises the floor to the lowest time of the busy principals, and forgets idle ones below it."""
        while self._heap:
            time, principal = self._heap[0]
            account = self._accounts[principal]
            if account.time != time:
                heapq.heapreplace(self._heap, (account.time, principal))
                continue
            self._floor = max(self._floor, time)
            if account.num_live:
                return
            heapq.heappop(self._heap)
            del self._accounts[principal]
